"""Makes what follows from the layout table: the C header `layout.h` and the tables in docs/explanation/architecture.md.

    python tools/generate_layout.py

writes both, in a checkout of the repository. A test compares the files with the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shoal.native import layout

__all__ = ["c_header", "documented", "markdown"]

ROOT = Path(__file__).parents[1]
HEADER = ROOT / "src" / "shoal" / "native" / "layout.h"
DOCS = ROOT / "docs" / "explanation" / "architecture.md"
BEGIN = "<!-- layout table: made by python tools/generate_layout.py -->"
END = "<!-- end of the layout table -->"
C_TYPES = {"u1": "uint8_t", "?": "uint8_t", "u4": "uint32_t", "u8": "uint64_t", "i8": "int64_t", "f8": "double"}

_TEXT = """\
/* Made by `python tools/generate_layout.py` from the table in layout.py: do not edit. */
#ifndef SHOAL_LAYOUT_H
#define SHOAL_LAYOUT_H

#include "crowd.h"

#define LAYOUT_FINGERPRINT {fingerprint}
enum {{
{constants}
}};

/* One pointer for each field of the slab that has a name of its own, in the order of the table. */
typedef struct {{
{fields}
}} Fields;

/* What a kernel counts for a thread, on a cache line of its own. env, phase: what it is doing; phase 0: unknown. */
typedef struct {{
    int64_t {tally}, spare[{spare}];
}} Tally;

#endif
"""


def c_header() -> str:
    """The text of layout.h."""
    named = [row for row in layout.FIELDS if not row.name.endswith(".i")]
    fields = [f"{row.c_type or C_TYPES[row.dtype]} *{row.name};" for row in named]
    return _TEXT.format(
        fingerprint=layout.FINGERPRINT, tally=", ".join(layout.TALLY), spare=8 - len(layout.TALLY),
        constants=_filled(f"{name} = {value}," for name, value in layout.CONSTANTS.items()), fields=_filled(fields),
    )  # fmt: skip


def _filled(parts: Iterable[str]) -> str:
    """Lines of whole parts, each line as full as it may be."""
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part) > 114:
            lines.append("")
        lines[-1] += f" {part}"
    return "\n".join("   " + line for line in lines)


def markdown() -> str:
    """The two tables of docs/explanation/architecture.md."""
    lines = ["| field | type | shape | written by | what it is |", "|---|---|---|---|---|"]
    for row in layout.FIELDS:
        axes = [str(layout.CONSTANTS.get(axis, axis)) for axis in row.shape]
        dtype = {"": "the leaf's", "?": "bool"}.get(row.dtype, C_TYPES.get(row.dtype, "").removesuffix("_t"))
        lines.append(f"| `{row.name}` | {dtype} | {', '.join(axes)} | {row.writer} | {row.meaning} |")
    lines += ["", "| counter | in | what it counts |", "|---|---|---|"]
    lines += [f"| `{row.name}` | `{row.array}` | {row.meaning} |" for row in layout.COUNTERS]
    return "\n".join(lines)


def documented(page: str) -> str:
    """A page with the tables between their two marks made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    HEADER.write_text(c_header())
    DOCS.write_text(documented(DOCS.read_text()))
