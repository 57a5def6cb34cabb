"""Reads pages back: they are well-formed XML below their first line."""

from xml.etree import ElementTree

HOSTILE = "<script>alert('&\"')</script>"


class Page:
    """A page as a tree.

    Attributes:
        html: its source.
        root: its tree.
        text: its text as one line, but for the style sheet.
        tiles: value and note by label.
    """

    def __init__(self, path):
        self.html = path.read_text()
        doctype, _, rest = self.html.partition("\n")
        assert doctype == "<!doctype html>"
        self.root = ElementTree.fromstring(rest)
        self.text = text(self.root.find("body"))
        tiles = [
            [text(element) for element in tile if element.get("class") != "bar"]
            for tile in self.root.findall(".//div[@class='tile']")
        ]
        self.tiles = {label: (value, note) for label, value, note in tiles}

    def tags(self):
        """Returns the names of all elements."""
        return [element.tag for element in self.root.iter()]

    def rows(self, title):
        """Returns the text of all cells of the tables in the section of that title."""
        for section in self.root.iter("section"):
            if text(section.find("h2")) == title:
                return [[text(cell) for cell in row] for row in section.iter("tr")]
        raise AssertionError(f"no section {title}")


def text(element):
    """Returns an element's text as one line."""
    return " ".join(" ".join(element.itertext()).split())


def assert_escaped(page):
    """Fails if a name of a run became HTML, or was not shown."""
    tags = page.tags()
    assert "script" not in tags and "alert" not in tags
    assert "<script" not in page.html
    assert HOSTILE in page.text


def assert_self_contained(page):
    """Fails if a page asks anything of a server, or runs a script."""
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.tags())
    for element in page.root.iter():
        for name, value in element.items():
            assert not name.startswith("on") and name != "src", element.tag
            if name == "href":
                assert value.startswith("#")
    for word in ("http:", "https:", "@import", "url(//"):
        assert word not in page.html
    assert page.html.count("url(") == page.html.count("url(#")


def assert_cards_are_labelled(page):
    """Fails if a cell that a narrow page labels has not the head of its column."""
    labelled = 0
    for table in page.root.iter("table"):
        if "cards" not in table.get("class", ""):
            continue
        heads = [text(head) for head in table.iter("th")]
        for row in table.find("tbody"):
            for head, cell in zip(heads, row, strict=False):  # one may span several
                assert cell.get("data-label") in (None, head)
                labelled += cell.get("data-label") is not None
    assert labelled


def hostile(value):
    """Returns a value from JSON in which every text is HTML."""
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value
