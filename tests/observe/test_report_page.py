from __future__ import annotations

from diloco.observe.report import STYLES, legend, page, section, series_style, table


def test_a_page_says_what_it_is_given_and_nothing_that_a_browser_would_take_for_tags() -> None:
    made = page("a <b>", "ok & well", [("3", "rows")], [section("Loss", "", "<svg/>", "1 < 2")], good=True)
    assert "<title>a &lt;b&gt;</title>" in made
    assert 'class="status ok">ok &amp; well<' in made
    assert "<b>3</b><span>rows</span>" in made
    assert "1 &lt; 2" in made
    assert "<svg/>" in made
    assert "status wrong" in page("t", "failed", [], [], good=False)


def test_what_is_empty_says_so() -> None:
    assert "Nothing was recorded." in section("Loss", "", "", "")
    assert table(("a",), []) == ""
    assert table(("a", "b"), [("1", "<2>")]).count("<td>") == 2


def test_series_have_as_many_styles_as_the_page() -> None:
    assert len({series_style(number) for number in range(20)}) == STYLES
    assert 'class="s1"' in legend([("b", series_style(1))])
