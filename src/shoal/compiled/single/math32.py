"""Math functions of 32 bits without branches, which LLVM can compute for many lanes at once.

The C library's are called lane by lane. Largest errors, in units in the last place (ulp) of the result, as
`tests/compiled/single/test_math32.py` measures them over all exponents:

| function | error |
|---|---|
| sin, cos | 1.6 ulp, or 1e-7 where the result is smaller than 0.5; nan beyond 2**30 |
| tan | 3.5 ulp where |x| is up to 1e5 and the result up to 1e4; nan beyond 2**30 |
| exp, log, log2, log10 | 2 ulp |
| sqrt | exact |
| atan, atan2, asin, acos, tanh | 4 ulp |
| pow, hypot | 1 ulp |

The polynomials are minimax fits on the intervals that arguments are reduced to. Nothing here may be contracted or
reordered by the compiler, so that all lanes, all threads and all processors get the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.compiled.single.intrinsics import bit_functions, inlined

_bits = bit_functions()
bits_of, float_of, fma, nearest, choose = (_bits[name] for name in ("bits_of", "float_of", "fma", "nearest", "choose"))
wide_float_of = _bits["wide_float_of"]

F, INT = np.float32, np.int32
ZERO, HALF, ONE, TWO, INF, NAN = F(0.0), F(0.5), F(1.0), F(2.0), F(np.inf), F(np.nan)
QUARTER_TURNS = 2.0 / math.pi
# pi / 2 in two parts of 53 bits each.
QUARTER_HIGH, QUARTER_LOW = math.pi / 2, 6.123233995736766e-17
WIDEST_ANGLE = F(2.0**30)
SIN = tuple(map(F, (-0.1666666664, 0.008333329076, -0.0001983923485, 2.717358989e-06)))
COS = tuple(map(F, (0.04166666662, -0.001388888335, 2.479941313e-05, -2.720139725e-07)))
EXP = tuple(map(F, (0.5000000096, 0.166665183, 0.04166620417, 0.008368953708, 0.00139506003)))
LOG = tuple(map(F, (0.3333331023, -0.2499998644, 0.2000224227, -0.1666927, 0.1421832657, -0.123837998, 0.1187507565,
                    -0.117940918, 0.06915595426)))  # fmt: skip
ATAN = tuple(map(F, (-0.3333332743, 0.1999969261, -0.1428013074, 0.1106024455, -0.08818848311, 0.06759572132,
                     -0.04494644587, 0.02276034099, -0.007422637736, 0.001134878338)))  # fmt: skip
ASIN = tuple(map(F, (0.1666665978, 0.07500517023, 0.04451446895, 0.03182868682, 0.01435849373, 0.03763008807)))
TANH = tuple(map(F, (-0.3333333089, 0.1333320923, -0.05394713319, 0.02170255919, -0.008181622722, 0.00214653825)))
PI, HALF_PI, PI_LOW, HALF_PI_LOW = F(math.pi), F(math.pi / 2), F(-8.742278e-08), F(-4.371139e-08)
LOG2_E, LN2_HIGH, LN2_LOW = F(1.4426950408889634), F(0.693359375), F(-2.12194440e-4)
LOWEST_EXPONENT, HIGHEST_EXPONENT = F(-104.0), F(89.0)
SMALLEST_NORMAL, TWO_23 = F(2.0**-126), F(2.0**23)
ROOT_HALF_BITS, SHIFT, BIAS, SIGN_BIT = INT(0x3F3504F3), INT(23), INT(127), INT(-(2**31))
LOG10_E, LOG2_E_WIDE, LOG10_E_WIDE = F(0.4342944819), 1.4426950408889634, 0.4342944819032518
TANH_SMALL = F(0.625)


@inlined
def reduced(x: Any) -> Any:
    """Return the angle within an eighth of a turn around the nearest quarter turn, and that quarter's number."""
    safe = choose(abs(x) <= WIDEST_ANGLE, x, NAN)
    angle = np.float64(choose(abs(x) <= WIDEST_ANGLE, x, ZERO))
    quarters = nearest(angle * QUARTER_TURNS)
    rest = fma(quarters, -QUARTER_HIGH, angle)
    rest = fma(quarters, -QUARTER_LOW, rest)
    return np.float32(rest) + (safe - safe), INT(quarters)


@inlined
def sin_near(r: Any) -> Any:
    z = r * r
    return fma(r * z, fma(fma(fma(SIN[3], z, SIN[2]), z, SIN[1]), z, SIN[0]), r)


@inlined
def cos_near(r: Any) -> Any:
    z = r * r
    rest = fma(fma(fma(COS[3], z, COS[2]), z, COS[1]), z, COS[0])
    return fma(z * z, rest, fma(z, -HALF, ONE))


@inlined
def with_sign(x: Any, sign: Any) -> Any:
    """Return x with its sign turned where the highest bit of `sign` is set."""
    return float_of(INT(bits_of(x) ^ INT(sign & SIGN_BIT)))


@inlined
def sin(x: Any) -> Any:
    r, quarter = reduced(x)
    found = choose(INT(quarter & INT(1)) == INT(0), sin_near(r), cos_near(r))
    return with_sign(found, INT(quarter << INT(30)))


@inlined
def cos(x: Any) -> Any:
    r, quarter = reduced(x)
    found = choose(INT(quarter & INT(1)) == INT(0), cos_near(r), sin_near(r))
    return with_sign(found, INT(INT(quarter + INT(1)) << INT(30)))


@inlined
def tan(x: Any) -> Any:
    r, quarter = reduced(x)
    s, c = sin_near(r), cos_near(r)
    return choose(INT(quarter & INT(1)) == INT(0), s, -c) / choose(INT(quarter & INT(1)) == INT(0), c, s)


@inlined
def power_of_two(n: Any) -> Any:
    """Return 2 ** n for n from -126 to 127."""
    return float_of(INT(INT(n + BIAS) << SHIFT))


@inlined
def exp(x: Any) -> Any:
    inside = choose(x > LOWEST_EXPONENT, choose(x < HIGHEST_EXPONENT, x, HIGHEST_EXPONENT), LOWEST_EXPONENT)
    n = nearest(inside * LOG2_E)
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, inside))
    rest = fma(fma(fma(fma(EXP[4], r, EXP[3]), r, EXP[2]), r, EXP[1]), r, EXP[0])
    found = fma(r * r, rest, r) + ONE
    whole = INT(n)
    half = INT(whole >> INT(1))
    return choose(x == x, found * power_of_two(half) * power_of_two(INT(whole - half)), x)


@inlined
def parts(x: Any) -> Any:
    """Return m - 1 and e of a positive x = m * 2 ** e, with m between the roots of a half and of two."""
    small = x < SMALLEST_NORMAL
    bits = bits_of(choose(small, x * TWO_23, x))
    e = INT(INT(bits - ROOT_HALF_BITS) >> SHIFT)
    m = float_of(INT(bits - INT(e << SHIFT)))
    return m - ONE, INT(e - choose(small, SHIFT, INT(0)))


@inlined
def log_parts(x: Any) -> Any:
    f, e = parts(x)
    tail = fma(fma(fma(LOG[8], f, LOG[7]), f, LOG[6]), f, LOG[5])
    rest = fma(fma(fma(fma(fma(tail, f, LOG[4]), f, LOG[3]), f, LOG[2]), f, LOG[1]), f, LOG[0])
    z = f * f
    return f, fma(z, -HALF, z * f * rest), np.float32(e)


@inlined
def log_limits(x: Any, found: Any) -> Any:
    """Return `found`, or what a logarithm is where there is no number for it."""
    return choose(x > ZERO, choose(x < INF, found, INF), choose(x == ZERO, -INF, NAN))


@inlined
def log(x: Any) -> Any:
    f, rest, e = log_parts(x)
    return log_limits(x, fma(e, LN2_HIGH, f + fma(e, LN2_LOW, rest)))


@inlined
def log2(x: Any) -> Any:
    f, rest, e = log_parts(x)
    return log_limits(x, np.float32((np.float64(f) + np.float64(rest)) * LOG2_E_WIDE + np.float64(e)))


@inlined
def log10(x: Any) -> Any:
    f, rest, e = log_parts(x)
    natural = (np.float64(f) + np.float64(rest)) + np.float64(e) * math.log(2.0)
    return log_limits(x, np.float32(natural * LOG10_E_WIDE))


@inlined
def atan_near(t: Any) -> Any:
    """Return the arc tangent of t from 0 to 1."""
    z = t * t
    tail = fma(fma(fma(fma(ATAN[9], z, ATAN[8]), z, ATAN[7]), z, ATAN[6]), z, ATAN[5])
    rest = fma(fma(fma(fma(fma(tail, z, ATAN[4]), z, ATAN[3]), z, ATAN[2]), z, ATAN[1]), z, ATAN[0])
    return fma(t * z, rest, t)


@inlined
def atan(x: Any) -> Any:
    a = abs(x)
    steep = a > ONE
    near = atan_near(choose(steep, ONE / a, a))
    return with_sign(choose(steep, HALF_PI - (near - HALF_PI_LOW), near), bits_of(x))


@inlined
def atan2(y: Any, x: Any) -> Any:
    a, b = abs(y), abs(x)
    steep = a > b
    low, high = choose(steep, b, a), choose(steep, a, b)
    # 0 / 0 and inf / inf are angles too.
    ratio = choose(high == ZERO, ZERO, choose(low == INF, ONE, low / high))
    near = atan_near(choose(y == y, ratio, NAN))
    angle = choose(steep, HALF_PI - (near - HALF_PI_LOW), near)
    angle = choose(bits_of(x) < INT(0), PI - (angle - PI_LOW), angle)
    return choose(x == x, with_sign(angle, bits_of(y)), x)


@inlined
def asin_near(r: Any, z: Any) -> Any:
    """Return the arc sine of r up to a half; z is its square."""
    rest = fma(fma(fma(fma(fma(ASIN[5], z, ASIN[4]), z, ASIN[3]), z, ASIN[2]), z, ASIN[1]), z, ASIN[0])
    return fma(r * z, rest, r)


@inlined
def asin(x: Any) -> Any:
    a = abs(x)
    far = a > HALF
    z = choose(far, (ONE - a) * HALF, a * a)
    near = asin_near(choose(far, np.float32(math.sqrt(z)), a), z)
    return with_sign(choose(far, HALF_PI - (TWO * near - HALF_PI_LOW), near), bits_of(x))


@inlined
def acos(x: Any) -> Any:
    a = abs(x)
    far = a > HALF
    z = choose(far, (ONE - a) * HALF, a * a)
    near = asin_near(choose(far, np.float32(math.sqrt(z)), a), z)
    outer = choose(x > ZERO, TWO * near, PI - (TWO * near - PI_LOW))
    return choose(far, outer, HALF_PI - (with_sign(near, bits_of(x)) - HALF_PI_LOW))


@inlined
def tanh(x: Any) -> Any:
    a = abs(x)
    z = a * a
    rest = fma(fma(fma(fma(fma(TANH[5], z, TANH[4]), z, TANH[3]), z, TANH[2]), z, TANH[1]), z, TANH[0])
    near = fma(a * z, rest, a)
    return with_sign(choose(a < TANH_SMALL, near, ONE - TWO / (exp(TWO * a) + ONE)), bits_of(x))


@inlined
def sqrt(x: Any) -> Any:
    return np.float32(math.sqrt(x))


@inlined
def hypot(x: Any, y: Any) -> Any:
    a, b = np.float64(x), np.float64(y)
    return np.float32(math.sqrt(a * a + b * b))


@inlined
def pow_magnitude(a: Any, y: Any) -> Any:
    """Return a ** y for a >= 0, computed in 64 bits."""
    f, e = parts(a)
    s = np.float64(f) / (np.float64(f) + 2.0)
    z = s * s
    series = fma(fma(fma(fma(fma(fma(z, 1 / 13, 1 / 11), z, 1 / 9), z, 1 / 7), z, 1 / 5), z, 1 / 3), z, 1.0)
    base = np.float64(e) + s * series * (2.0 * LOG2_E_WIDE)
    base = choose(a == ZERO, -np.inf, choose(a == INF, np.inf, base))
    full = base * np.float64(y)
    full = choose(full > 200.0, 200.0, choose(full < -200.0, -200.0, full))
    known = choose(full == full, full, 0.0)
    n = nearest(known)
    t = (known - n) * math.log(2.0)
    tail = fma(fma(fma(fma(t, 1 / 40320, 1 / 5040), t, 1 / 720), t, 1 / 120), t, 1 / 24)
    rest = fma(fma(fma(fma(tail, t, 1 / 6), t, 0.5), t, 1.0), t, 1.0)
    found = np.float32(rest * wide_float_of((np.int64(n) + np.int64(1023)) << np.int64(52)))
    return choose(full == full, found, NAN)


@inlined
def pow(x: Any, y: Any) -> Any:
    a = abs(x)
    whole = nearest(y) == y
    half = y * HALF
    odd = whole & (nearest(half) != half)
    size = choose(a == ONE, ONE, pow_magnitude(a, y))
    negative = bits_of(x) < INT(0)
    signed = choose(negative & odd, -size, size)
    lost = (x < ZERO) & (not whole) & (a < INF)
    found = choose(lost, NAN, signed)
    nothing = (x != x) | (y != y)
    return choose((y == ZERO) | (x == ONE), ONE, choose(nothing, NAN, found))
