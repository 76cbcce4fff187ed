"""A prompt's text, each token on the colour of its record, with the roles of the task underlined."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import cycle

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from qed_probe.figures import style

FONT, SIZE = "DejaVu Sans Mono", 6.5
ADVANCE = 0.602 * SIZE / 72  # this font's width of a character, in inches
LINE = 0.17
SHORT = 6  # lines that fit a paper's column
GAP = " … "
SHOWN = {"\n": "↵", "\t": "⇥", "\r": "␍", "\\n": "↵", "\\t": "⇥", "\\r": "␍"}
ROLE_COLOURS = {
    "needle": style.VERMILION, "current": style.VERMILION, "question": style.SKY, "answer": style.GREEN, "stale": style.ORANGE,
    "other": style.PURPLE, "noise": style.EMPTY, "text": style.EMPTY,
}  # fmt: skip
OTHER_COLOURS = (style.PURPLE, style.ORANGE, style.BLUE, style.YELLOW)


@dataclass(frozen=True)
class Piece:
    """A token, or what fits of it on one line: its text, its first column and its line; token −1 is a gap."""

    token: int
    text: str
    column: int
    line: int


@style.styled
def draw_token_strip(ds: xr.Dataset) -> Figure:
    """The text in a fixed-width font: a short one at the width of a paper's column, any other at the width of its page.

    NaN and infinity are grey; "…" stands for tokens left out; the roles "noise" and "" are not underlined.
    """
    cells = _cells(ds)
    width, columns = _size(sum(len(text) for _, text in cells))
    pieces = wrap(cells, columns)
    lines = pieces[-1].line + 1 if pieces else 1
    figure = style.new_figure(width, lines * LINE + 0.65)
    axes = figure.subplots()
    axes.set_xlim(0, columns)
    axes.set_ylim(lines, 0)
    axes.set_axis_off()
    value = ds["value"].where(np.isfinite(ds["value"])).values
    signed, top = bool((value < 0).any()), float(ds["top"].fillna(0)) or 1.0
    cmap = mpl.colormaps["PuOr" if signed else "cividis"].with_extremes(bad=style.EMPTY)
    scale = ScalarMappable(Normalize(-top if signed else 0, top), cmap)
    faces = scale.to_rgba(value)
    for piece in pieces:
        _draw_piece(axes, piece, faces[piece.token] if piece.token >= 0 else mpl.colors.to_rgba("white"))
    _underline(figure, axes, [(piece, str(ds["role"].values[piece.token])) for piece in pieces if piece.token >= 0])
    clipped = bool((np.abs(value) > top).any())
    extend = "neither" if not clipped else "both" if signed else "max"
    figure.colorbar(scale, ax=axes, label=_label(ds), location="bottom", pad=0.02, aspect=8 * width, shrink=0.5, extend=extend)
    style.write_below(figure, [*_notes(ds), *([f"The colours end at the 99 % quantile, {top:.3g}."] if clipped else [])])
    return figure


def wrap(cells: list[tuple[int, str]], columns: int) -> list[Piece]:
    """Lay cells (token, text) out on lines of ``columns`` characters; only one that is longer than a line is split."""
    pieces: list[Piece] = []
    line = column = 0
    for token, text in cells:
        if column and column + len(text) > columns:
            line, column = line + 1, 0
        for start in range(0, len(text), columns):
            line, column = (line + 1, 0) if start else (line, column)
            part = text[start : start + columns]
            pieces.append(Piece(token, part, column, line))
            column += len(part)
    return pieces


def _cells(ds: xr.Dataset) -> list[tuple[int, str]]:
    """The tokens, and a gap before each that others were left out before; what the font cannot show becomes �."""
    font = get_font(findfont(FONT))
    cells: list[tuple[int, str]] = []
    for token, (text, skipped) in enumerate(zip(ds["text"].values, ds["skipped"].values, strict=True)):
        shown = SHOWN.get(str(text)) or "".join(SHOWN.get(c, c) for c in str(text))
        cells += [(-1, GAP)] if skipped else []
        cells.append((token, "".join(c if c.isprintable() and font.get_char_index(ord(c)) else "�" for c in shown)))
    return cells


def _size(letters: int) -> tuple[float, int]:
    """The figure's width and the characters of a line, such that all lines are about equally long."""
    fit = {width: int((width - 0.1) / ADVANCE) for width in (style.COLUMN, style.PAGE)}
    width = style.COLUMN if letters <= SHORT * fit[style.COLUMN] else style.PAGE
    lines = max(1, math.ceil(letters / fit[width]))
    return width, max(8, math.ceil(letters / lines))


def _draw_piece(axes: Axes, piece: Piece, face: tuple[float, ...]) -> None:
    ink = "white" if np.dot(face[:3], (0.299, 0.587, 0.114)) < 0.5 else "black"
    if piece.token >= 0:
        axes.add_patch(Rectangle((piece.column, piece.line + 0.06), len(piece.text), 0.74, facecolor=face, linewidth=0))
    for i, letter in enumerate(piece.text):
        if letter != " ":
            place = (piece.column + i + 0.5, piece.line + 0.43)
            axes.text(*place, letter, family=FONT, fontsize=SIZE, color=ink, ha="center", va="center", parse_math=False)


def role_colours(roles: Collection[str]) -> dict[str, str]:
    """A colour a role, the same in every figure for the roles of the tasks; others take colours in order of their names."""
    others = dict(zip(sorted(set(roles) - set(ROLE_COLOURS)), cycle(OTHER_COLOURS), strict=False))
    return {role: colour for role, colour in (ROLE_COLOURS | others).items() if role in roles}


def _underline(figure: Figure, axes: Axes, pieces: list[tuple[Piece, str]]) -> None:
    colours = role_colours({role for _, role in pieces} - {"", "noise"})
    marked = [(p, colours[role]) for p, role in pieces if role in colours]
    spans = [[(p.column, p.line + 0.89), (p.column + len(p.text), p.line + 0.89)] for p, _ in marked]
    axes.add_collection(LineCollection(spans, colors=[c for _, c in marked], linewidths=1.8, capstyle="butt"))
    if colours:
        handles = [Line2D([], [], color=colour, linewidth=1.8, label=role) for role, colour in colours.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)


def _label(ds: xr.Dataset) -> str:
    units = ds["value"].attrs["units"]
    return str(ds["value"].attrs["long_name"]) + (f" ({units})" if units != "1" else "")


def _notes(ds: xr.Dataset) -> list[str]:
    shown, tokens = ds.sizes["token"], ds.attrs["prompt_tokens"]
    count = f"all {tokens:,} tokens." if shown == tokens else f"{shown:,} of {tokens:,} tokens; “…” stands for those left out."
    which = f"prompt {ds.attrs['prompt']} of {ds.attrs['prompts']:,} (counted from 0)"
    lines = [f"{ds.attrs['subject']}, {ds.attrs['where']}; {which}, {count}"]
    if ds.attrs["nonfinite"]:
        lines.append(f"{ds.attrs['nonfinite']:,} values are not finite (grey).")
    return lines
