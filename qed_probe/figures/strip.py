"""A prompt's text, each token on the colour of its record, with the roles of the task underlined."""

from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import xarray as xr
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
SHOWN = {"\n": "↵", "\t": "⇥", "\r": "␍"}
ROLE_COLOURS = (style.VERMILION, style.SKY, style.GREEN, style.PURPLE, style.ORANGE, style.YELLOW, style.BLUE)


@dataclass(frozen=True)
class Piece:
    """A token, or what fits of it on one line: its text, its first column and its line."""

    token: int
    text: str
    column: int
    line: int


@style.styled
def draw_token_strip(ds: xr.Dataset) -> Figure:
    """The text line by line in a fixed-width font; NaN and infinity are grey, the role "noise" and "" are not underlined."""
    columns = int((style.PAGE - 0.8) / ADVANCE)
    pieces = wrap([str(x) for x in ds["text"].values], columns)
    lines = pieces[-1].line + 1 if pieces else 1
    figure = style.new_figure(style.PAGE, lines * LINE + 0.45)
    axes = figure.subplots()
    axes.set_xlim(0, columns)
    axes.set_ylim(lines, 0)
    axes.set_axis_off()
    value = ds["value"].values
    finite = value[np.isfinite(value)]
    signed = finite.size and finite.min() < 0 < finite.max()
    # One huge value must not paint all others alike: the scale ends at the 99th percentile, and says so by its pointed end.
    top = float(np.quantile(np.abs(finite), 0.99) if finite.size else 0) or 1.0
    norm = Normalize(-top if signed else 0, top)
    cmap = mpl.colormaps["PuOr" if signed else "cividis"]
    for piece in pieces:
        x = value[piece.token]
        face = cmap(norm(x)) if np.isfinite(x) else mpl.colors.to_rgba(style.EMPTY)
        ink = "white" if np.dot(face[:3], (0.299, 0.587, 0.114)) < 0.5 else "black"
        axes.add_patch(Rectangle((piece.column, piece.line + 0.06), len(piece.text), 0.74, facecolor=face, linewidth=0))
        for i, letter in enumerate(piece.text):
            if letter != " ":
                place = (piece.column + i + 0.5, piece.line + 0.43)
                axes.text(*place, letter, family=FONT, fontsize=SIZE, color=ink, ha="center", va="center", parse_math=False)
    shown = [str(x) for x in dict.fromkeys(ds["role"].values) if x not in ("", "noise")]
    colours = dict(zip(shown, ROLE_COLOURS, strict=False))
    marked = [(p, colours[r]) for p in pieces if (r := str(ds["role"].values[p.token])) in colours]
    spans = [[(p.column, p.line + 0.89), (p.column + len(p.text), p.line + 0.89)] for p, _ in marked]
    axes.add_collection(LineCollection(spans, colors=[c for _, c in marked], linewidths=1.8, capstyle="butt"))
    scale = ScalarMappable(norm, cmap)
    extend = "both" if signed else "max"
    figure.colorbar(scale, ax=axes, label=_label(ds), pad=0.01, aspect=max(8 * lines * LINE, 5), fraction=0.03, extend=extend)
    if shown:
        handles = [Line2D([], [], color=colour, linewidth=1.8, label=role) for role, colour in colours.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), frameon=False)
    style.write_below(figure, [_title(ds), style.note(ds)])
    return figure


def wrap(texts: list[str], columns: int) -> list[Piece]:
    """Lay tokens out on lines of ``columns`` characters; what the font cannot show becomes �."""
    font = get_font(findfont(FONT))
    pieces: list[Piece] = []
    at = 0
    for token, text in enumerate(texts):
        letters = [SHOWN.get(c, c) for c in text]
        printable = "".join(c if c.isprintable() and font.get_char_index(ord(c)) else "�" for c in letters)
        while printable:
            line, column = divmod(at, columns)
            part, printable = printable[: columns - column], printable[columns - column :]
            pieces.append(Piece(token, part, column, line))
            at += len(part)
    return pieces


def _label(ds: xr.Dataset) -> str:
    units = ds["value"].attrs["units"]
    return str(ds["value"].attrs["long_name"]) + (f" ({units})" if units != "1" else "")


def _title(ds: xr.Dataset) -> str:
    parts = [f"{ds.attrs['record']} at {ds.attrs['where']}; prompt {ds.attrs['prompt']}, {ds.sizes['token']:,} of its tokens"]
    if ds.attrs["tokens_before"]:
        parts.append(f"{ds.attrs['tokens_before']:,} before them not shown")
    if ds.attrs["nonfinite"]:
        parts.append(f"{ds.attrs['nonfinite']:,} values not finite (grey)")
    return ";  ".join(parts)
