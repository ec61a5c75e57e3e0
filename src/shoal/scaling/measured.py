"""What Shoal's own work takes, in seconds, as measured. Written by one command, see docs/scaling.md:

python benchmarks/scaling_model.py --parts constants --save
"""

from __future__ import annotations

MEASURED_ON = "Ray 2.60.0, Python 3.11.7, 2 cores"
COSTS = {
    "batch": 9.5e-05,
    "message": 0.00031,
    "large": 0.00024,
    "lane": 1e-07,
    "byte": 2e-10,
    "host_message": 0.00039,
    "host_large": 0.00065,
    "host_lane": 6.7e-07,
    "host_byte": 3.6e-10,
    "transport": 0.00052,
}
