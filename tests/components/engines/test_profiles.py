"""An engine's profile says what it serves, in which formats and in how many bits."""

from __future__ import annotations

from components.engines.profiles import ENGINES, OWN_PARTS, PROFILES, profile_of, refusals
from components.weight_format import Storage


def test_engines_are_told_apart_by_what_they_take_in_few_bits() -> None:
    default, whole = Storage("int8", 0, ("fc", "lm_head")), Storage("int8", 32)
    able = {
        engine: [not list(refusals(engine, "eagle3", {}, None, one)) for one in (default, whole)] for engine in ENGINES
    }
    assert able["vllm"] == [True, True]
    assert able["sglang"] == [True, False], "its fc is no quantised layer"
    assert able["llama.cpp"] == [False, True], "its converter packs every matrix, in groups of 32"
    assert not any(any(found) for engine, found in able.items() if engine not in ("vllm", "sglang", "llama.cpp"))
    for engine in ENGINES:
        served = profile_of(engine).methods.get("eagle3") is not None
        assert (not list(refusals(engine, "eagle3", {}, None, Storage("bf16")))) == served, "bf16 goes everywhere"
    (why,) = refusals("llama.cpp", "eagle3", {}, None, Storage("int4", 32))
    assert "weights: int8 or bf16" in why and "\n" not in why


def test_engines_that_cannot_tap_other_layers_refuse_them() -> None:
    def taking(*taps: int) -> set[str]:
        served = [name for name, profile in PROFILES.items() if "eagle3" in profile.methods]
        return {name for name in served if not any("tap" in one for one in refusals(name, "eagle3", {}, taps=taps))}

    assert taking(1, 3, 5) == {"vllm", "sglang", "llama.cpp", "speculators"}
    assert taking(1, 2, 3, 4, 5) == taking(4) == {"vllm", "speculators"}
    assert len(taking()) == 7
    assert not any("tap" in one for one in refusals("mnn", "draft-model", {}, taps=(1, 3, 5))), "it reads none"


def test_engines_that_pass_over_what_an_imported_drafter_has_of_its_own_refuse_it() -> None:
    def refusing(setting: str) -> set[str]:
        served = [name for name, profile in PROFILES.items() if "eagle3" in profile.methods]
        return {
            name
            for name in served
            if any(OWN_PARTS[setting] in one for one in refusals(name, "eagle3", {setting: True}))
        }

    assert refusing("own_embedding") == {"sglang", "mnn", "tensorrt-llm", "openvino"}
    assert refusing("qk_norm") == {"sglang", "mnn", "tensorrt-llm", "openvino", "vllm", "llama.cpp"}
    assert refusing("window") == {"sglang", "mnn", "tensorrt-llm", "openvino", "llama.cpp"}
