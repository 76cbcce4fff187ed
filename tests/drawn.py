"""What a figure says, and whether it can be read."""

import itertools

from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def texts(figure: Figure) -> str:
    """All words, a line each."""
    return "\n".join(x.get_text() for x in figure.findobj(Text))


def drawn(figure: Figure) -> RendererAgg:
    """The canvas that the figure was drawn on."""
    renderer = RendererAgg(*figure.bbox.size, figure.dpi)  # type: ignore[no-untyped-call]
    figure.draw(renderer)
    return renderer


def check_words(figure: Figure) -> None:
    """No words leave the page or lie on each other."""
    renderer = drawn(figure)
    page = figure.bbox
    words = [x for x in figure.findobj(Text) if x.get_visible() and x.get_text().strip()]
    shown, hidden = [x for x in words if x.get_fontfamily() != ["DejaVu Sans Mono"]], hidden_ticks(figure)
    boxes = [(x.get_text(), x.get_window_extent(renderer)) for x in shown if x not in hidden]
    for text, box in boxes:
        assert page.x0 - 1 <= box.x0, text
        assert box.x1 <= page.x1 + 1, text
        assert page.y0 - 1 <= box.y0, text
        assert box.y1 <= page.y1 + 1, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert min(a.x1, b.x1) - max(a.x0, b.x0) <= 1 or min(a.y1, b.y1) - max(a.y0, b.y0) <= 1, (one, other)


def hidden_ticks(figure: Figure) -> set[Text]:
    """Matplotlib keeps labels of ticks that lie beyond an axis, and of axes that are off, and does not draw them."""
    found: set[Text] = set()
    for axes in (each for panel in figure.axes for each in (panel, *panel.child_axes)):
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            slack = 1e-9 * (high - low)
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not axes.axison or not low - slack <= tick.get_loc() <= high + slack:
                    found |= {tick.label1, tick.label2}
    return found
