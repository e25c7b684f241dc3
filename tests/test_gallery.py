"""The gallery shows every picture of the documentation once, with a link to where it is explained."""

from scripts.gallery import DOCS, PAGE, gallery, pictures, pictures_of, slug


def test_the_gallery_is_that_of_the_pages():
    assert PAGE.read_text(encoding="utf-8") == gallery(), "python -m scripts.gallery writes it anew"


def test_no_picture_is_missing():
    shown = [picture.file.name for picture in pictures()]
    files = sorted(path.name for path in (DOCS / "images").iterdir() if path.is_file())
    assert sorted(shown) == files
    assert all(picture.text for picture in pictures())


def test_a_picture_is_found_below_its_heading(tmp_path):
    page = tmp_path / "page.md"
    pictures = ("![one](images/a.png)", "![two](../images/b.png) ![three](small/c.png)")
    page.write_text(f"# Top\n\n{pictures[0]}\n\n## The `x` of [it](y.md)!\n\n{pictures[1]}\n")
    found = [(each.file.name, each.text, each.title, each.section) for each in pictures_of(page)]
    assert found == [("a.png", "one", "Top", ""), ("b.png", "two", "Top", "The x of it!")]
    assert slug(found[1][3]) == "the-x-of-it"
