"""Hundreds of ways to spoil a good checkpoint, over all formats: each is refused in one line that says where.

What no check can see is left out and stands here: a square matrix transposed, one finite number for another, a flag
that changes no tensor (norm_output), sizes that no tensor and no target knows better.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_formats import FORMS, drafter_state
from torch import Tensor

from components.contract import UserError
from components.publish.formats.interface import Source
from components.publish.formats.registry import layout_of, read_folder, write_format

NUM_MUTATIONS = 272


Change = Callable[[Path, random.Random], str | None]
"""Spoils the checkpoint of a folder; returns what was done, None where this folder has nothing to do it to."""


def weights_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def with_tensors(change: Callable[[dict[str, Tensor], random.Random], str | None]) -> Change:
    def spoil(folder: Path, rng: random.Random) -> str | None:
        tensors = load_file(weights_of(folder))
        what = change(tensors, rng)
        if what is not None:
            save_file({n: t.contiguous() for n, t in tensors.items()}, weights_of(folder))
        return what

    return spoil


def floats(tensors: dict[str, Tensor]) -> list[str]:
    return sorted(name for name, tensor in tensors.items() if tensor.is_floating_point())


def dropped(tensors: dict[str, Tensor], rng: random.Random) -> str | None:
    needed = sorted(name for name in tensors if name != "embed_tokens.weight" or "mask_hidden" in tensors)
    tensors.pop(name := rng.choice(needed))
    return f"{name} dropped"


def added(tensors: dict[str, Tensor], rng: random.Random) -> str | None:
    name = rng.choice(["layers.7.x", "midlayer.self_attn.q_norm.weight", "rotary_emb.inv_freq", "model.extra"])
    tensors[name] = torch.zeros(rng.randint(1, 4))
    return f"{name} added"


def renamed(tensors: dict[str, Tensor], rng: random.Random) -> str | None:
    name = rng.choice(sorted(tensors))
    tensors[(after := rng.choice([f"model.{name}", name.replace("weight", "w") + "_", name.upper()]))] = tensors.pop(
        name
    )
    return f"{name} renamed to {after}"


def transposed(tensors: dict[str, Tensor], rng: random.Random) -> str | None:
    oblong = [name for name in floats(tensors) if tensors[name].ndim == 2 and len(set(tensors[name].shape)) == 2]
    name = rng.choice(oblong)
    tensors[name] = tensors[name].T
    return f"{name} transposed"


def mistyped(tensors: dict[str, Tensor], rng: random.Random) -> str | None:
    name = rng.choice(floats(tensors))
    others = [torch.float64, torch.int32, torch.bfloat16, torch.float16, torch.int8]
    tensors[name] = tensors[name].to(rng.choice(others))
    return f"{name} mistyped"


def cut(tensors: dict[str, Tensor], rng: random.Random) -> str | None:
    name = rng.choice(floats(tensors))
    tensors[name] = tensors[name][:-1] if rng.random() < 0.5 else tensors[name].unsqueeze(0)
    return f"{name} cut or unsqueezed"


def not_finite(tensors: dict[str, Tensor], rng: random.Random) -> str | None:
    name = rng.choice(floats(tensors))
    place = rng.randrange(tensors[name].numel())
    tensors[name].view(-1)[place] = rng.choice([float("nan"), float("inf"), -float("inf")])
    return f"{name} not finite"


def wrong_vocabulary(tensors: dict[str, Tensor], rng: random.Random) -> str | None:
    if "d2t" not in tensors:
        return None
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    ids = d2t + torch.arange(len(d2t))
    kind = rng.choice(["absolute", "far", "negative", "swapped", "twice", "flipped", "int32", "bytes"])
    if kind == "absolute":
        tensors["d2t"] = ids
    elif kind in ("far", "negative"):
        d2t[rng.randrange(len(d2t))] += 10_000 if kind == "far" else -10_000
    elif kind == "swapped":
        ids[[0, 1]] = ids[[1, 0]]
        tensors["d2t"] = ids - torch.arange(len(ids))
    elif kind == "twice":
        d2t[1] = ids[0] - 1
    elif kind == "flipped":
        place = rng.randrange(len(t2d))
        t2d[place] = ~t2d[place]
    else:
        tensors["d2t" if kind == "int32" else "t2d"] = d2t.int() if kind == "int32" else t2d.to(torch.uint8)
    return f"vocabulary {kind}"


def config_changed(folder: Path, rng: random.Random) -> str | None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    places = list(wrong_values(config))
    path, value = rng.choice(places)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    if value is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    file.write_text(json.dumps(config))
    return f"config {'.'.join(map(str, path))} = {value!r}"


ABSENT = object()


NUMBERS: tuple[str, ...] = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


NUMBERS += ("num_hidden_layers", "medusa_num_heads", "medusa_num_layers", "num_nextn_predict_layers")


NUMBERS += ("draft_vocab_size", "target_hidden_size", "max_position_embeddings")


def wrong_values(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(place, value) of everything in a config that is certainly wrong."""
    for key, value in config.items():
        here = (*path, key)
        if key in NUMBERS:
            yield from ((here, wrong) for wrong in (value + 1, 0, -value, str(value), float(value) + 0.5, True))
            if key != "target_hidden_size":
                yield here, ABSENT
        if key in ("rope_theta", "rms_norm_eps") and path != ("transformer_layer_config", "rope_parameters"):
            yield from ((here, wrong) for wrong in (0, -1.0, str(value), None, ABSENT, [value]))
        if key in ("torch_dtype",) and (not path or path[-1] != "transformer_layer_config"):
            yield from ((here, wrong) for wrong in ("float16", "int8", 32))
        if key == "architectures":
            yield from ((here, wrong) for wrong in (["GPT2LMHeadModel"], [], "LlamaForCausalLM", ABSENT))
        if key in ("attention_bias", "mlp_bias"):
            yield here, True
        if key == "hidden_act":
            yield here, "gelu"
        if key == "head_dim":
            yield from ((here, wrong) for wrong in (value + 2, value - 1, -value, "8"))
        if key in ("eos_token_id", "bos_token_id") and value is not None:
            yield from ((here, wrong) for wrong in (-1, 10**6, "</s>"))
        if key == "transformer_layer_config":
            yield here, ABSENT
            yield from wrong_values(value, here)
        if key == "speculators_config":
            yield from (((*here, "algorithm"), wrong) for wrong in ("eagle1", ABSENT))
            yield from (((*here, "proposal_methods"), wrong) for wrong in ([], [{}], ABSENT))
            yield (*here, "verifier"), ABSENT
        if key == "eagle_aux_hidden_state_layer_ids":
            yield from ((here, wrong) for wrong in ([2, 4, 8], [5, 4, 2], [2, 4], [2, 4, 4], "2, 4, 5"))
        if key == "model_type":
            yield from ((here, wrong) for wrong in ("gpt2", 7))
    if not path:
        yield ("auto_map",), {"AutoModel": "evil.py"}
        yield ("quantization_config",), {"bits": 4}
    if "attention_bias" in config:
        yield (*path, "bias"), True
        wrong_ropes = ({"rope_type": "spiral"}, {"rope_type": 7}, {"rope_theta": config["rope_theta"] * 2}, "linear")
        yield from (((*path, name), wrong) for name in ("rope_parameters", "rope_scaling") for wrong in wrong_ropes)


def config_file(folder: Path, rng: random.Random) -> str | None:
    file = folder / "config.json"
    text = file.read_text()
    kind = rng.choice(["gone", "empty", "cut", "list", "nan", "twice", "link", "bytes"])
    if kind == "gone":
        file.unlink()
    elif kind == "link":
        file.rename(folder / "elsewhere.json")
        file.symlink_to(folder / "elsewhere.json")
    elif kind == "bytes":
        file.write_bytes(b"\xff\xfe" + text.encode())
    else:
        twice = text.rstrip().removesuffix("}") + ', "vocab_size": 3, "vocab_size": 4}'
        nan = text.rstrip().removesuffix("}") + ', "rms_norm_eps_": NaN}'
        changed = {"empty": "", "cut": text[: len(text) // 2], "list": f"[{text}]", "twice": twice, "nan": nan}
        file.write_text(changed[kind])
    return f"config.json {kind}"


def weights_file(folder: Path, rng: random.Random) -> str | None:
    file = weights_of(folder)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    kind = rng.choice(["gone", "empty", "cut", "few", "more", "link", "pickle", "zip", "huge", "garbage", "beside"])
    if kind == "gone":
        file.unlink()
    elif kind == "link":
        file.rename(folder / "blob")
        file.symlink_to(folder / "blob")
    elif kind == "beside":
        (folder / rng.choice(["pytorch_model.bin", "x.pt", "y.pkl"])).write_bytes(pickle.dumps({}))
    else:
        changed = {
            "empty": b"",
            "cut": data[: rng.randrange(8 + length, len(data))],
            "few": data[: rng.randrange(1, 8)],
            "more": data + b"\0" * rng.randint(1, 9),
            "pickle": pickle.dumps({"a": [1.0] * 40}),
            "zip": b"PK\x03\x04" + data[4:],
            "huge": (2**40).to_bytes(8, "little") + data[8:],
            "garbage": data[:8] + bytes(rng.randrange(128, 256) for _ in range(length)) + data[8 + length :],
        }
        file.write_bytes(changed[kind])
    return f"weights {kind}"


def lying_header(folder: Path, rng: random.Random) -> str | None:
    file = weights_of(folder)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = sorted(name for name in header if name != "__metadata__")
    entry = header[name := rng.choice(names)]
    kind = rng.choice(["shape", "dtype", "offsets", "overlap", "entry", "unknown"])
    if kind == "shape":
        entry["shape"] = [*entry["shape"][:-1], entry["shape"][-1] + 1]
    elif kind == "dtype":
        entry["dtype"] = "F64" if entry["dtype"] != "F64" else "F16"
    elif kind == "unknown":
        entry["dtype"] = "F12"
    elif kind == "offsets":
        entry["data_offsets"] = [entry["data_offsets"][0], entry["data_offsets"][1] + 10**9]
    elif kind == "overlap":
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        first = 4 if entry["data_offsets"][0] == 0 else 0
        entry["data_offsets"] = [first, first + size]
    else:
        header[name] = rng.choice([None, {}, [1, 2], "x"])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"header lies about {name}: {kind}"


def wrong_index(folder: Path, rng: random.Random) -> str | None:
    file = weights_of(folder)
    names = sorted(load_file(file))
    weight_map = dict.fromkeys(names, file.name)
    kind = rng.choice(["strange", "missing", "extra", "outside", "none", "list"])
    if kind == "strange":
        weight_map[rng.choice(names)] = "model-00002-of-00002.safetensors"
    elif kind == "missing":
        del weight_map[rng.choice(names)]
    elif kind == "extra":
        weight_map["lm_head.bias"] = file.name
    elif kind == "outside":
        weight_map[rng.choice(names)] = "../../etc/passwd"
    index: Any = {"none": {}, "list": {"weight_map": names}}.get(kind, {"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return f"index {kind}"


CHANGES: list[Change] = [
    with_tensors(dropped),
    with_tensors(added),
    with_tensors(renamed),
    with_tensors(transposed),
    with_tensors(mistyped),
    with_tensors(cut),
    with_tensors(not_finite),
    with_tensors(wrong_vocabulary),
    config_changed,
    config_changed,
    config_changed,
    config_file,
    weights_file,
    weights_file,
    lying_header,
    wrong_index,
]


@pytest.fixture(scope="module")
def sound(
    networks: Callable[..., Any], source: Source, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[str, Path]]:
    """(format, folder) of a good checkpoint of every form."""
    root = tmp_path_factory.mktemp("sound")
    made = []
    for number, (name, method, settings) in enumerate(FORMS):
        folder = root / f"{number}-{name}"
        write_format(name, drafter_state(networks(method, settings, name), settings), source, folder)
        read_folder(folder, source.shape)
        made.append((name, folder))
    return made


@pytest.mark.parametrize("number", range(NUM_MUTATIONS))
def test_a_spoiled_checkpoint_is_refused_in_one_line(
    number: int, sound: list[tuple[str, Path]], source: Source, tmp_path: Path
) -> None:
    rng = random.Random(number)
    name, folder = sound[number % len(sound)]
    spoiled = tmp_path / "spoiled"
    shutil.copytree(folder, spoiled)
    changes = [CHANGES[(number // len(sound)) % len(CHANGES)], *rng.sample(CHANGES, len(CHANGES))]
    what = next(what for change in changes if (what := change(spoiled, rng)) is not None)
    with pytest.raises(UserError) as refused:
        read_folder(spoiled, source.shape)
        pytest.fail(f"{name}: {what}: was let through")
    said = str(refused.value)
    assert "\n" not in said and len(said) < 400, said
    assert said.startswith("spoiled"), f"{what}: names no place: {said}"


ODD: list[Any] = [None, True, -1, 0, 7, 1e308, "x", "", [], {}, [[]], {"a": 1}, [None], [-3, "y"], "\ud800"]


@pytest.mark.parametrize("number", range(60))
def test_no_config_makes_the_check_fall_over(
    number: int, sound: list[tuple[str, Path]], source: Source, tmp_path: Path
) -> None:
    """Any value in any place is let through or refused in one line; nothing else comes out."""
    rng = random.Random(number)
    _, folder = sound[number % len(sound)]
    spoiled = tmp_path / "spoiled"
    shutil.copytree(folder, spoiled)
    config = json.loads((spoiled / "config.json").read_text())
    for _ in range(8):
        inner = config
        while True:
            key = rng.choice(sorted(inner) if isinstance(inner, dict) else range(len(inner)))
            if isinstance(inner[key], dict | list) and inner[key] and rng.random() < 0.7:
                inner = inner[key]
                continue
            before, inner[key] = inner[key], rng.choice(ODD)
            break
        (spoiled / "config.json").write_text(json.dumps(config))
        with contextlib.suppress(UserError):
            read_folder(spoiled, source.shape)
        with contextlib.suppress(UserError):
            read_folder(spoiled)
        inner[key] = before


def test_every_kind_of_change_is_among_them(sound: list[tuple[str, Path]]) -> None:
    assert {(number // len(sound)) % len(CHANGES) for number in range(NUM_MUTATIONS)} == set(range(len(CHANGES)))
    assert {layout_of(name).format for name, _ in sound} == {name for name, *_ in FORMS}
