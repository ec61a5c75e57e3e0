"""Makes what follows from the layout table: the C header `layout.h` and the tables in docs/architecture.md.

    python -m shoal.native.generate

writes both, in a checkout of the repository. A test compares the files with the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shoal.native import layout

__all__ = ["c_header", "documented", "markdown"]

HEADER = Path(__file__).with_name("layout.h")
DOCS = Path(__file__).parents[3] / "docs" / "architecture.md"
BEGIN = "<!-- layout table: made by python -m shoal.native.generate -->"
END = "<!-- end of the layout table -->"
C_TYPES = {"u1": "uint8_t", "?": "uint8_t", "u4": "uint32_t", "u8": "uint64_t", "i8": "int64_t", "f8": "double"}

_TEXT = """\
/* Made by `python -m shoal.native.generate` from the table in layout.py: do not edit.
 *
 * Fields has one typed pointer for each field of the slab that has a fixed name, in the order of the table. */
#ifndef SHOAL_LAYOUT_H
#define SHOAL_LAYOUT_H

#include "compat.h"
#include "doorbell.h"

#define LAYOUT_FINGERPRINT {fingerprint}

enum {{
{constants}
}};

typedef struct {{
{fields}
}} Fields;
#define FIELDS {count}
_Static_assert(sizeof(Fields) == FIELDS * sizeof(void *), "fields_read fills it as an array of pointers");
_Static_assert(sizeof(Bell) == BELL_WORDS * sizeof(uint32_t), "a bell has a cache line of its own");

/* On a cache line of its own, one for each thread. env, phase: what the kernel does; phase 0 where it does not say. */
typedef struct {{
    int64_t {tally}, spare[{spare}];
}} Tally;

/* Points to the fields of a slab. `offsets` has one for each field, in bytes; -1 for one that this slab lacks. */
static int fields_read(Fields *fields, char *slab, PyObject *offsets) {{
    void *found[FIELDS];
    if (!PyTuple_Check(offsets) || PyTuple_Size(offsets) != FIELDS) {{
        PyErr_SetString(PyExc_ValueError, "one offset for each field is needed");
        return -1;
    }}
    for (Py_ssize_t i = 0; i < FIELDS; i++) {{
        Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GetItem(offsets, i));
        found[i] = offset < 0 ? NULL : slab + offset;
    }}
    if (PyErr_Occurred()) return -1;
    memcpy(fields, found, sizeof found);
    return 0;
}}

#endif
"""


def c_header() -> str:
    """The text of layout.h."""
    named = [row for row in layout.FIELDS if not row.name.endswith(".i")]
    fields = [f"    {row.c_type or C_TYPES[row.dtype]} *{row.name};" for row in named]
    return _TEXT.format(
        fingerprint=layout.FINGERPRINT,
        constants="\n".join(_filled(f"{name} = {value}," for name, value in layout.CONSTANTS.items())),
        fields="\n".join(fields), count=len(fields), tally=", ".join(layout.TALLY), spare=8 - len(layout.TALLY),
    )  # fmt: skip


def _filled(words: Iterable[str]) -> list[str]:
    """Lines of words, each as full as it may be."""
    lines = [" "]
    for word in words:
        if len(lines[-1]) + len(word) > 116:
            lines.append(" ")
        lines[-1] += ("   " if lines[-1] == " " else " ") + word
    return lines


def markdown() -> str:
    """The two tables of docs/architecture.md."""
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
