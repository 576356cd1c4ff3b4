"""Whatever is done to pipelines.yaml, `check` says right or gives one line a fault, and never a traceback."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from toy_garden import GARDEN, PACKAGES

from components.contract import UserError
from flows.sources import kind_of_source
from flows.spec import load_spec
from flows.wiring import check_spec
from storage.artifacts import Store

SCRAPS = st.sampled_from(
    ["\t", "{", "}", "[", "]", ":", "- ", "&a ", "*a", "!!int ", "'", '"', "|", "\n", "  ", "${", "#"]
)


@st.composite
def mutilated(draw: st.DrawFn) -> str:
    text = GARDEN
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(text)))
        cut = draw(st.integers(0, 12))
        text = text[:place] + draw(st.one_of(SCRAPS, st.just(""), st.text(max_size=3))) + text[place + cut :]
    return text


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(mutilated(), st.text(max_size=60)))
def test_no_text_gives_a_traceback(text: str, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    folder = Path(tmp_path_factory.getbasetemp())
    file = folder / "pipelines.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    store = Store(folder / "no-home")
    try:
        check_spec(load_spec(file), outside=lambda name: kind_of_source(name, store), packages=PACKAGES)
    except UserError as error:
        for line in str(error).splitlines():
            assert line.startswith(("pipelines.yaml:", str(file))), line
            assert len(line) < 600
