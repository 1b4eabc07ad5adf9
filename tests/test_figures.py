"""figures: a picture is one element that fits any page: no date, no colour of its own, no id that meets another."""

import re
from xml.etree import ElementTree

import matplotlib
import pytest

from aerie import figures
from aerie.figures import Series

LINES = [Series("first", [(step, 9 / step) for step in range(1, 60)]), Series("second", [(1, 2.0), (50, 1.0)])]
PICTURES = {
    "lines": lambda name: figures.lines(name, "a label", LINES, "step", "loss", (20, "chosen")),
    "bars": lambda name: figures.bars(name, "a label", ["one", "two"], {"rate": [2.0, 1.0]}, "tok/s", str, [(1, 3), (1, 1)]),
    "grouped": lambda name: figures.bars(name, "a label", ["one", "two"], {"a": [0.5, None], "b": [0.25, 0.5]}, "y", str),
    "scatter": lambda name: figures.scatter(name, "a label", [Series("prompts", [(1.0, 1.1), (2.0, 1.9)])], "x", "y"),
    "ranked": lambda name: figures.ranked(name, "a label", {"one": [0.5, 0.7], "two": [2.0, 1.0]}, "x", "y", 1.0),
}  # fmt: skip


@pytest.fixture(params=PICTURES, ids=PICTURES)
def draw(request):
    return PICTURES[request.param]


def texts(picture):
    return [
        element.text for element in ElementTree.fromstring(namespaced(picture)).iter() if element.tag.endswith("text")
    ]


def namespaced(picture):
    """Return a picture as a document of its own: inside a page the parser of HTML knows the namespace."""
    return picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def test_a_picture_is_a_single_well_formed_element_with_a_label_and_no_size(draw):
    root = ElementTree.fromstring(namespaced(draw("p")))
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == "a label"
    assert "viewBox" in root.attrib and not {"width", "height"} & set(root.attrib)


def test_equal_numbers_give_equal_bytes_whatever_the_readers_settings(draw):
    expected = draw("p")
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "svg.hashsalt": None}):
        assert draw("p") == expected
    assert "<metadata" not in expected and "<!--" not in expected and "<style" not in expected


def test_all_colours_are_variables_of_the_page(draw):
    picture = draw("p")
    assert re.findall(r"#[0-9a-f]{6}\b", picture) == []
    assert "var(--" in picture and "font-family" not in picture


def test_ids_of_two_pictures_never_meet_and_every_reference_has_its_id(draw):
    for name in ("p", "q"):
        picture = draw(name)
        ids = re.findall(r' id="([^"]+)"', picture)
        pointed_to = {one or other for one, other in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', picture)}
        assert set(ids) == pointed_to and len(ids) == len(set(ids))
        assert all(identifier.startswith(f"{name}-") for identifier in ids)


def test_a_label_and_a_name_are_escaped():
    picture = figures.lines("p", 'a "label" & <more>', [Series("<script>", [(1, 1), (2, 2)]), LINES[1]], "<x>", "y")
    root = ElementTree.fromstring(namespaced(picture))
    assert root.attrib["aria-label"] == 'a "label" & <more>'
    assert "<script>" in texts(picture) and "<x>" in texts(picture)
    assert "<script" not in picture


def test_bars_show_their_values_and_leave_out_what_is_unknown():
    assert [text for text in texts(PICTURES["grouped"]("p")) if text in ("0.5", "0.25", "None")].count("None") == 0
    assert texts(PICTURES["bars"]("p")).count("2.0") >= 1


def test_large_numbers_on_an_axis_have_thousands_separators():
    picture = figures.lines("p", "label", [Series("one", [(0, 0.0), (20_000, 1.0)])], "step", "loss")
    assert "20,000" in texts(picture) or "10,000" in texts(picture)


def test_thinning_keeps_short_lines_and_averages_long_ones():
    points = [(float(n), float(n % 2)) for n in range(1000)]
    assert figures.thin(points[:400]) == points[:400]
    thinned = figures.thin(points, most=100)
    assert len(thinned) == 100 and thinned[0] == (4.5, 0.5) and thinned[-1] == (994.5, 0.5)
