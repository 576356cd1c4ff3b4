"""Damage to folders of models, drafters and checkpoints: one kind a function, each a pure function of its chance.

A kind is given the folder and a `random.Random`, changes the folder, and says what it did; NotHere where the folder has
nothing of the sort, a chat template say. What has to become of it is told by `Mutant.wanted`.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

Wanted = Literal["same", "refused", "either"]
Act = Callable[[Path, random.Random], "Done"]
ITEMSIZE: Final = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "BOOL": 1}
NAN, INFINITY = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"  # of float32


class NotHere(Exception):
    """The folder has nothing that this kind could damage."""


@dataclass(frozen=True)
class Done:
    """What was done. file: the name of what was damaged. wanted: "refused" by one line that names the file or folder,
    "same" tokens as undamaged, or "either": refused, or something finite comes out."""

    file: str
    what: str
    wanted: Wanted = "either"


# -- files -------------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    """Every file of the folder, by name."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def weights_in(folder: Path, chance: random.Random) -> Path:
    return chance.choice([file for file in files_of(folder) if file.suffix == ".safetensors"])


def flip(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(files_of(folder))
    data = bytearray(file.read_bytes())
    near = min(len(data), 400) if chance.random() < 0.6 else len(data)  # headers are at the start
    places = [chance.randrange(near) for _ in range(chance.choice((1, 3, 40)))]
    for place in places:
        data[place] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return Done(file.name, f"bits of the bytes {places[:3]}")


def cut(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(files_of(folder))
    data = file.read_bytes()
    length = chance.choice((1, 7, 8, 9, len(data) // 2, len(data) - 1, chance.randrange(len(data))))
    file.write_bytes(data[:length])
    return Done(file.name, f"cut to {length} of {len(data)}", "refused" if file.suffix == ".safetensors" else "either")


def zeros(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(files_of(folder))
    data = bytearray(file.read_bytes())
    start = chance.choice((0, chance.randrange(len(data))))
    stop = min(len(data), start + chance.choice((8, 512, len(data))))
    data[start:stop] = bytes(stop - start)
    file.write_bytes(data)
    return Done(file.name, f"zeros from {start} to {stop}")


def emptied(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(files_of(folder))
    file.write_bytes(b"")
    return Done(file.name, "emptied", "refused" if file.suffix == ".safetensors" else "either")


def more_bytes(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(files_of(folder))
    file.write_bytes(file.read_bytes() + chance.randbytes(chance.choice((1, 8, 4096))))
    return Done(file.name, "more bytes", "refused" if file.suffix == ".safetensors" else "either")


def removed(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(files_of(folder))
    file.unlink()
    return Done(file.name, "removed")


def a_folder(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(files_of(folder))
    file.unlink()
    file.mkdir()
    return Done(file.name, "a folder")


def a_pipe(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(files_of(folder))
    file.unlink()
    os.mkfifo(file)
    return Done(file.name, "a pipe")


def link_to_itself(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(files_of(folder))
    file.unlink()
    file.symlink_to(file.name)
    return Done(file.name, "a link to itself")


def link_outside(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(files_of(folder))
    file.unlink()
    file.symlink_to("/etc/passwd")
    return Done(file.name, "a link to /etc/passwd")


def other_file(folder: Path, chance: random.Random) -> Done:
    file, other = chance.choice(files_of(folder)), chance.choice(files_of(folder))
    file.write_bytes(other.read_bytes())
    return Done(file.name, f"the content of {other.name}")


def bystander(folder: Path, chance: random.Random) -> Done:
    name = chance.choice(("README.md", "notes.txt", ".cache"))
    (folder / name).write_bytes(chance.randbytes(100))
    return Done(name, "a file that is nobody's business", "same")


# -- safetensors -------------------------------------------------------------------------------------------------------


def read_parts(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_parts(file: Path, header: dict[str, Any] | str, body: bytes) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def header_length(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    lie = chance.choice((0, 1, length - 1, length + 1, len(data), 10**8, 10**8 + 1, 2**40, 2**63 - 1, 2**64 - 1))
    file.write_bytes(lie.to_bytes(8, "little") + data[8:])
    return Done(file.name, f"a header of {lie} bytes", "refused")


def header_text(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    _, body = read_parts(file)
    deep = "[" * 3000 + "]" * 3000
    text = chance.choice(
        ("{", "nothing", "[]", "null", "7", '"x"', "{}", '{"a": 1}', '{"a": {}}', deep, f'{{"a":{deep}}}')
    )
    write_parts(file, text, body)
    return Done(file.name, f"a header that says {text[:20]}", "refused")


def header_entry(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    header, body = read_parts(file)
    name = chance.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    first, last = entry["data_offsets"]
    changes: list[dict[str, Any]] = [
        {"data_offsets": [last, first]},
        {"data_offsets": [first, last + 8]},
        {"data_offsets": [first + 4, last]},
        {"data_offsets": [-8, last]},
        {"data_offsets": [first, 2**62]},
        {"data_offsets": [first]},
        {"data_offsets": "0"},
        {"data_offsets": [0, last - first] if first else [last, 2 * last]},
        {"dtype": "F31"},
        {"dtype": None},
        {"dtype": ["F32"]},
        {"dtype": {"F32": 1}},
        {"shape": [-1, *entry["shape"]]},
        {"shape": [2**62, 2**62]},
        {"shape": [10**300]},
        {"shape": None},
        {"shape": [[1]]},
        {"shape": [1.5]},
        {"shape": [True, *entry["shape"]]},
        {"shape": [0]},
        {"shape": "4"},
    ]
    change = chance.choice(changes)
    write_parts(file, {**header, name: {**entry, **change}}, body)
    return Done(file.name, f"{name} of {change}"[:150], "refused")


def header_twice(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    header, body = read_parts(file)
    name = chance.choice([name for name in header if name != "__metadata__"])
    write_parts(file, json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[name])}}}', body)
    return Done(file.name, f"{name} twice", "refused")


def header_spaces(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    header, body = read_parts(file)
    write_parts(file, json.dumps(header) + " " * chance.choice((1, 8, 64)), body)
    return Done(file.name, "blanks after the header", "same")


def metadata(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    header, body = read_parts(file)
    before = header.get("__metadata__", {})
    odd = strange(chance)
    header["__metadata__"] = chance.choice((odd, {**before, chance.choice([*before, "format"]): odd}, {}))
    write_parts(file, header, body)
    return Done(file.name, f"metadata {json.dumps(header['__metadata__'])[:60]}")


def rename_tensor(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    header, body = read_parts(file)
    name = chance.choice([name for name in header if name != "__metadata__"])
    new = chance.choice(
        (name + "x", name[1:], "", "../" + name, name.replace(".", "/"), "x" * 5000, "\u0000", "weird\n")
    )
    if new == name or new in header:
        raise NotHere
    header[new] = header.pop(name)
    write_parts(file, header, body)
    return Done(file.name, f"{name} is called {new[:40]!r}", "refused")


def remove_tensor(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    header, body = read_parts(file)
    name = chance.choice([name for name in header if name != "__metadata__"])
    first, last = header.pop(name)["data_offsets"]
    for entry in (header[other] for other in header if other != "__metadata__"):
        if entry["data_offsets"][0] >= last:
            entry["data_offsets"] = [offset - last + first for offset in entry["data_offsets"]]
    write_parts(file, header, body[:first] + body[last:])
    # a moment of an optimiser that is not there has not been needed yet, as far as anyone can tell
    moment = name.startswith(("exp_avg", "momentum", "muon/", "adamw/"))
    return Done(file.name, f"{name} removed", "either" if moment or name == "t2d" else "refused")


def reshape_tensor(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    header, body = read_parts(file)
    name = chance.choice([name for name, entry in header.items() if name != "__metadata__" and len(entry["shape"]) > 0])
    shape = header[name]["shape"]
    new = chance.choice((list(reversed(shape)), [1, *shape], [*shape, 1], [shape[0] * 2, *shape[1:]]))
    if new == shape:
        raise NotHere
    if len(new) == len(shape) and new[0] == 2 * shape[0]:
        first, last = header[name]["data_offsets"]
        size = last - first
        for other, entry in header.items():
            if other != "__metadata__" and entry["data_offsets"][0] >= last:
                entry["data_offsets"] = [offset + size for offset in entry["data_offsets"]]
        header[name]["data_offsets"] = [first, last + size]
        body = body[:last] + body[first:last] + body[last:]
    header[name]["shape"] = new
    write_parts(file, header, body)
    return Done(file.name, f"{name} of {shape} is {new}", "either" if name == "t2d" else "refused")


def retype_tensor(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    header, body = read_parts(file)
    name = chance.choice(
        [name for name, entry in header.items() if name != "__metadata__" and entry["dtype"] != "BOOL"]
    )
    entry = header[name]
    same = {4: ("I32", "U32", "F32"), 8: ("I64", "U64", "F64", "C64"), 2: ("F16", "BF16", "I16", "U16")}
    old, new = entry["dtype"], chance.choice(same.get(ITEMSIZE[entry["dtype"]], ("U8",)))
    if new == old:
        raise NotHere
    entry["dtype"] = new
    write_parts(file, header, body)
    return Done(file.name, f"{name} is {new}", "refused" if old == "F32" else "either")


def no_number(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    header, body = read_parts(file)
    floats = [name for name, entry in header.items() if name != "__metadata__" and entry["dtype"] == "F32"]
    if not floats:
        raise NotHere
    name = chance.choice(floats)
    first, last = header[name]["data_offsets"]
    value, numbers = chance.choice((NAN, INFINITY, b"\x00\x00\x80\xff")), (last - first) // 4
    changed = bytearray(body)
    for number in range(numbers) if chance.random() < 0.3 else [chance.randrange(numbers)]:
        changed[first + 4 * number : first + 4 * number + 4] = value
    write_parts(file, header, bytes(changed))
    return Done(file.name, f"{name} holds {'NaN' if value == NAN else 'infinity'}", "refused")


# -- index files -------------------------------------------------------------------------------------------------------


def index(folder: Path, chance: random.Random) -> Done:
    file = folder / "model.safetensors.index.json"
    if not file.is_file():
        raise NotHere
    told = json.loads(file.read_text())
    name = chance.choice(sorted(told["weight_map"]))
    deep: Any = "x"
    for _ in range(60):
        deep = [deep]
    changes: list[tuple[Any, Wanted]] = [
        ({**told, "weight_map": {**told["weight_map"], name: "model-00099.safetensors"}}, "refused"),
        ({**told, "weight_map": {**told["weight_map"], name: "../x.safetensors"}}, "refused"),
        ({**told, "weight_map": {**told["weight_map"], name: "/etc/passwd"}}, "refused"),
        ({**told, "weight_map": {**told["weight_map"], name: str(folder / "config.json")}}, "refused"),
        ({**told, "weight_map": {**told["weight_map"], name: ""}}, "refused"),
        ({**told, "weight_map": {**told["weight_map"], name: "."}}, "refused"),
        ({**told, "weight_map": {**told["weight_map"], name: "x\u0000y"}}, "refused"),
        ({**told, "weight_map": {**told["weight_map"], name: "x" * 5000}}, "refused"),
        ({**told, "weight_map": {**told["weight_map"], name: 7}}, "refused"),
        ({**told, "weight_map": {**told["weight_map"], name: "config.json"}}, "refused"),
        ({**told, "weight_map": [name]}, "refused"),
        ({**told, "weight_map": None}, "refused"),
        ({**told, "weight_map": deep}, "refused"),
        ({**told, "weight_map": {}}, "either"),
        ({**told, "metadata": None}, "either"),
        ({"metadata": {}}, "refused"),
        ([], "refused"),
        (None, "refused"),
    ]
    content, wanted = chance.choice(changes)
    file.write_text(json.dumps(content))
    return Done(file.name, f"{name}: {json.dumps(content)[-50:]}", wanted)


# -- descriptions in JSON ----------------------------------------------------------------------------------------------


def strange(chance: random.Random) -> Any:
    """A value that nobody expects where it will stand."""
    deep: Any = 1
    for _ in range(chance.choice((5, 60))):
        deep = [deep] if chance.random() < 0.5 else {"a": deep}
    return chance.choice(
        (
            *(None, "", "auto", "\ud800", "../../x", "x" * 200_000, True, False, -1, 0, 1, 2, 3, 7, 1000, 2**31),
            *(2**63, -(2**63), 10**400, 0.5, -1.0, 1e308, 1e-308, float("nan"), float("inf"), float("-inf")),
            *([], [1, 2], [None], ["x"] * 3000, {}, {"a": 1}, {"rope_type": "default"}, deep),
        )
    )


def descriptions(folder: Path) -> list[Path]:
    return [file for file in files_of(folder) if file.suffix == ".json" and not file.name.endswith("index.json")]


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a description but those far down in long lists."""
    if isinstance(content, dict):
        keys: list[Any] = list(content)[:60]
    else:
        keys = list(range(min(len(content), 5)))
    for key in keys:
        yield content, key
        if isinstance(content[key], (dict, list)):
            yield from places(content[key])


def value(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(descriptions(folder) or missing())
    content = json.loads(file.read_text())
    told = []
    for _ in range(chance.choice((1, 1, 2))):
        container, key = chance.choice(list(places(content)))
        container[key] = strange(chance)
        told.append(f"{key}: {json.dumps(container[key])[:40]}")
    file.write_text(json.dumps(content))
    return Done(file.name, "; ".join(told))


def key_gone(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(descriptions(folder) or missing())
    content = json.loads(file.read_text())
    container, key = chance.choice([found for found in places(content) if isinstance(found[0], dict)])
    old = container.pop(key)
    if chance.random() < 0.4:
        container[key + "s"] = old
    file.write_text(json.dumps(content))
    return Done(file.name, f"{key} is gone")


def white_space(folder: Path, chance: random.Random) -> Done:
    file = chance.choice(descriptions(folder) or missing())
    content = json.loads(file.read_text())
    file.write_text("\n\n" + json.dumps(content, indent=chance.choice((None, 0, 7)), ensure_ascii=True) + "\n\n")
    return Done(file.name, "written with other blanks", "same")


def missing() -> list[Path]:
    raise NotHere


def changed_config(folder: Path, chance: random.Random, **changes: Any) -> Done:
    file = folder / "config.json"
    if not file.is_file():
        raise NotHere
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return Done(file.name, ", ".join(f"{name}: {json.dumps(changes[name])[:60]}" for name in changes))


def config_family(folder: Path, chance: random.Random) -> Done:
    types = (
        "gpt2",
        "opt",
        "bert",
        "gpt_neox",
        "bloom",
        "t5",
        "mamba",
        "gemma2",
        "phi3",
        "mixtral",
        "qwen3_next",
        "vit",
    )
    types += (
        "no_such_model",
        "llama4",
        "falcon",
        "deepseek_v2",
        "mistral",
        "qwen2",
        "cohere",
        "gpt_oss",
        "granite",
        "",
    )
    return changed_config(folder, chance, model_type=chance.choice(types))


def config_architecture(folder: Path, chance: random.Random) -> Done:
    names: tuple[Any, ...] = (["GPT2LMHeadModel"], ["BertModel"], [], None, "LlamaForCausalLM", [7], [None], ["x\ny"])
    return changed_config(folder, chance, architectures=chance.choice((*names, ["../x"], {"a": 1}, ["x" * 9000])))


def config_code(folder: Path, chance: random.Random) -> Done:
    (folder / "own.py").write_text("raise SystemExit(9)\n")
    done = changed_config(
        folder,
        chance,
        auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
        trust_remote_code=True,
    )
    if chance.random() < 0.5:
        return changed_config(folder, chance, model_type=chance.choice(("own", "", None)))
    return done


def config_heads(folder: Path, chance: random.Random) -> Done:
    odd = chance.choice(
        (
            *({"head_dim": n} for n in (0, -16, 1, 15, 17, 32, 2**20, 1.5, None, "16")),
            *({"num_attention_heads": n} for n in (0, 1, 3, 5, 8, -4, 2**31, "4")),
            *({"num_key_value_heads": n} for n in (0, 3, 4, 1, 8, None, -2, [2])),
            *({"hidden_size": n} for n in (0, 63, 65, 128, 2**20, 2**40, "64")),
            *({"intermediate_size": n} for n in (0, 1, 127, 2**33, None)),
            *({"qk_rope_head_dim": n} for n in (0, 7, 16, 2**20)),
            *({"kv_lora_rank": n} for n in (0, 25, None, 2**20)),
            *({"num_experts": n, "n_routed_experts": n} for n in (0, 1, 5, -1, 2**20)),
            *({"num_experts_per_tok": n} for n in (0, 5, -1, 2**20)),
        )
    )
    return changed_config(folder, chance, **odd)


def config_dtype(folder: Path, chance: random.Random) -> Done:
    name = chance.choice(("dtype", "torch_dtype"))
    odd = ("", "float31", "int8", "float64", "float16", None, 7, [], {}, "torch.float32", "float8_e4m3fn", "nn", "auto")
    return changed_config(folder, chance, **{name: chance.choice(odd)})


def config_rope(folder: Path, chance: random.Random) -> Done:
    kinds = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "no_such", "", None, 7, "proportional")
    rope: dict[str, Any] = {"rope_type": chance.choice(kinds), "rope_theta": 10000.0}
    for name in ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "short_factor"):
        if chance.random() < 0.5:
            rope[name] = chance.choice((2.0, 0.0, -1.0, 64, 1e300, None, "2", [1.0] * 8, float("nan"), 0, 1.0))
    if chance.random() < 0.4:
        rope[chance.choice(("rope_theta", "partial_rotary_factor", "type"))] = strange(chance)
    odd = chance.choice((rope, rope, rope, "yarn", [], 7, {"full_attention": rope}))
    return changed_config(folder, chance, **{chance.choice(("rope_parameters", "rope_scaling")): odd})


def config_vocabulary(folder: Path, chance: random.Random) -> Done:
    size = chance.choice((0, 1, 383, 385, 512, 2**20, 2**31, 2**33, -1))
    return replace(changed_config(folder, chance, vocab_size=size), wanted="refused")


def config_tie(folder: Path, chance: random.Random) -> Done:
    return changed_config(folder, chance, tie_word_embeddings=chance.choice((True, True, None, "no", 0, [])))


def config_layers(folder: Path, chance: random.Random) -> Done:
    layers = chance.choice((0, 1, 7, 9, 12, 100, 10**6, -8, "8", 8.0))
    done = changed_config(folder, chance, num_hidden_layers=layers)
    return replace(done, wanted="refused") if layers in (0, 9, 12, 100, 10**6, -8) else done


def config_ids(folder: Path, chance: random.Random) -> Done:
    name = chance.choice(("eos_token_id", "bos_token_id", "pad_token_id"))
    odd = ([], [0, 1], [0, None], "0", -1, 384, 2**40, 0.5, [[0]], {}, None, True, ["x"], float("nan"))
    return changed_config(folder, chance, **{name: chance.choice(odd)})


def config_norm(folder: Path, chance: random.Random) -> Done:
    name = chance.choice(("rms_norm_eps", "hidden_act", "max_position_embeddings", "attention_bias", "layer_types"))
    odd = (0.0, -1.0, 1e-300, float("nan"), "gelu", "no_such", "silu", 1, 0, 4, 2**40, None, [], ["full_attention"] * 3)
    return changed_config(folder, chance, **{name: chance.choice(odd)})


def config_quantised(folder: Path, chance: random.Random) -> Done:
    methods = ("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "no_such", "", None, "mxfp4", "torchao")
    told = chance.choice(({"quant_method": chance.choice(methods), "bits": 4}, "fp8", [], 7))
    return changed_config(folder, chance, quantization_config=told)


def config_nested(folder: Path, chance: random.Random) -> Done:
    depth = chance.choice((50, 120, 5000, 200_000))
    file = folder / "config.json"
    if not file.is_file():
        raise NotHere
    deep = "[" * depth + "]" * depth
    file.write_text(
        file.read_text().rstrip()[:-1].rstrip() + f', "{chance.choice(("note", "rope_scaling"))}": {deep}}}'
    )
    return Done(file.name, f"nested {depth} deep", "refused" if depth > 100 else "either")


# -- tokenizers --------------------------------------------------------------------------------------------------------


def edited(folder: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> Done:
    file = folder / name
    if not file.is_file():
        raise NotHere
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))
    return Done(name, "")


def added_tokens(folder: Path, chance: random.Random) -> Done:
    number = chance.choice((384, 385, 1000, 2**31, 2**32 + 1, -1, 0, 5, "7", None))
    text = chance.choice(("<|more|>", "", " ", "e", "def", "\u0000", "x" * 100_000, "<|end|>"))
    token = {"id": number, "content": text, "special": chance.random() < 0.5}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    edited(folder, "tokenizer.json", lambda content: content["added_tokens"].append(token))
    return Done("tokenizer.json", f"added token {number}: {text[:20]!r}")


def vocabulary(folder: Path, chance: random.Random) -> Done:
    word = chance.choice(("Ġ", "e", "d", "f", "zz"))
    number = chance.choice((384, 10**6, 2**32, -1, 0, 1.5, None, "x"))
    edited(folder, "tokenizer.json", lambda content: content["model"]["vocab"].update({word: number}))
    return Done("tokenizer.json", f"{word} is token {number}")


def merges(folder: Path, chance: random.Random) -> Done:
    odd: Any = chance.choice(([["no", "such"]], ["a b c"], [[]], [["a"]], None, "x", [7], [["Ġ", "Ġ"]], []))
    edited(folder, "tokenizer.json", lambda content: content["model"].update(merges=odd))
    return Done("tokenizer.json", f"merges {odd}")


def tokenizer_part(folder: Path, chance: random.Random) -> Done:
    part = chance.choice(("normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "truncation", "padding"))
    odd: Any = chance.choice(
        (
            {"type": "NoSuch"},
            {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"},
            {"type": "Replace", "pattern": {"Regex": "["}, "content": "b"},
            {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
            {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
            {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
            {"type": "WordLevel", "vocab": {}, "unk_token": "x"},
            {"max_length": 0, "stride": 5, "strategy": "LongestFirst", "direction": "Right"},
            {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
            {"strategy": {"Fixed": 2**40}, "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
            strange(chance),
        )
    )
    edited(folder, "tokenizer.json", lambda content: content.update({part: odd}))
    return Done("tokenizer.json", f"{part}: {json.dumps(odd)[:80]}")


def tokenizer_class(folder: Path, chance: random.Random) -> Done:
    name = chance.choice(("tokenizer_class", "model_max_length", "eos_token", "bos_token", "add_bos_token", "auto_map"))
    names = (
        "LlamaTokenizer",
        "GPT2Tokenizer",
        "BertTokenizer",
        "NoSuch",
        "T5Tokenizer",
        "PreTrainedTokenizerFast",
        "os",
    )
    odd = chance.choice((*names, strange(chance), strange(chance), {"AutoTokenizer": ["own.Tokenizer", None]}, "e"))
    edited(folder, "tokenizer_config.json", lambda content: content.update({name: odd}))
    return Done("tokenizer_config.json", f"{name}: {json.dumps(odd)[:80]}")


TEMPLATES: Final = (
    "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "{% for i in range(10**18) %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ messages[7]['content'] }}",
    "{{ messages.nothing.at.all }}",
    "{% if %}",
    "{{",
    "",
    " ",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{% set x = namespace(v='ab') %}{% for i in range(60) %}{% set x.v = x.v ~ x.v %}{% endfor %}{{ x.v }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages | tojson }}" + " " * 1_000_000,
    "{{ 10**10**8 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ 'a'.center(10**10) }}",
    "{{ [0] * 10**10 }}",
    "{{ messages[0].content.no_such() }}",
    "{{ lipsum(n=10**6) }}",
    "{{ '(a+)+$' }}\ud800",
    "{{ tools[0].x }}",
    "{{ None + 1 }}",
    "{{ messages | map(attribute='content') | join | int('x') + 1 }}",
    "{{ dict(a=1).b.c }}",
    "{{ '{}'.format() }}",
    "{{ 'é'.encode('ascii') }}",
    "{{ [].pop() }}",
    "{{ {}['x'] }}",
    "{{ '<|end|>' * 3 }}{{ messages[0].content }}",
)


def template(folder: Path, chance: random.Random) -> Done:
    text = chance.choice(TEMPLATES)
    odd: Any = chance.choice((text,) * 12 + ([{"name": "other", "template": text}], {"other": text}, 7, [7], None))
    if not (folder / "tokenizer_config.json").is_file():
        raise NotHere
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if isinstance(odd, str) and chance.random() < 0.5:
        (folder / "chat_template.jinja").write_bytes(odd.encode("utf-8", "surrogatepass"))
        return Done("chat_template.jinja", f"{odd[:60]!r}")
    edited(folder, "tokenizer_config.json", lambda content: content.update(chat_template=odd))
    return Done("tokenizer_config.json", f"chat_template: {json.dumps(odd)[:80]}")


def generation(folder: Path, chance: random.Random) -> Done:
    file = folder / "generation_config.json"
    if not file.is_file():
        raise NotHere
    name = chance.choice(
        ("eos_token_id", "temperature", "max_length", "num_beams", "transformers_version", "do_sample")
    )
    odd = strange(chance)
    edited(folder, file.name, lambda content: content.update({name: odd}))
    return Done(file.name, f"{name}: {json.dumps(odd)[:60]}")


# -- a drafter's own description ---------------------------------------------------------------------------------------


def draft_record(folder: Path, chance: random.Random) -> Done:
    file = folder / "draft.json"
    if not file.is_file():
        raise NotHere
    record = json.loads(file.read_text())
    names = (
        "method",
        "settings",
        "num_steps",
        "max_depth",
        "target",
        "format",
        "trained",
        "draft_vocab_size",
        "storage",
    )
    name = chance.choice(names)
    methods = ("eagle1", "medusa", "mtp", "ngram", "draft-model", "p-eagle", "os", "lookahead", "mtp-parallel")
    settings = (
        "num_layers",
        "num_heads",
        "ttt_steps",
        "model",
        "init_seed",
        "start",
        "hidden_size",
        "intermediate_size",
    )
    if name == "method":
        record[name] = chance.choice((*methods, strange(chance)))
    elif name == "settings" and chance.random() < 0.8:
        record[name] = {**record.get(name, {}), chance.choice(settings): strange(chance)}
    elif name == "target" and chance.random() < 0.7:
        record[name] = {**record.get(name, {}), chance.choice(("hidden_size", "vocab_size", "key")): strange(chance)}
    elif name == "storage":
        weights = chance.choice(("bf16", "int8", "int4", "int3", 8, None))
        keep = chance.choice(([], ["fc"], None, "fc"))
        record[name] = {"weights": weights, "group_size": chance.choice((0, 8, 32, -1, "8", None)), "keep": keep}
    else:
        record[name] = strange(chance)
    file.write_text(json.dumps(record))
    return Done(file.name, f"{name}: {json.dumps(record[name])[:100]}")


# -- what a training checkpoint says of itself -------------------------------------------------------------------------


def progress(folder: Path, chance: random.Random) -> Done:
    file = weights_in(folder, chance)
    header, body = read_parts(file)
    told = header.get("__metadata__", {})
    names = [name for name in ("progress", "plan", "step", "seconds") if name in told]
    if not names:
        raise NotHere
    name = chance.choice(names)
    text = told[name]
    if name in ("progress", "plan") and chance.random() < 0.7:
        content = json.loads(text)
        container, key = chance.choice([found for found in places(content) if isinstance(found[0], dict)])
        if chance.random() < 0.3:
            del container[key]
        else:
            container[key] = strange(chance)
        told[name] = json.dumps(content)
    else:
        odd = (
            "",
            "x",
            "-1",
            "1e9",
            "nan",
            "inf",
            "99",
            "2.5",
            "null",
            "[]",
            "{",
            text[:-1],
            "1" * 5000,
            re.sub(r"\d", "9", text),
        )
        told[name] = chance.choice(odd)
    write_parts(file, header, body)
    return Done(file.name, f"{name}: {told[name][:80]}")


KINDS: Final[dict[str, Act]] = {
    kind.__name__: kind
    for kind in (
        *(flip, cut, zeros, emptied, more_bytes, removed, a_folder, a_pipe, link_to_itself, link_outside, other_file),
        *(bystander, header_length, header_text, header_entry, header_twice, header_spaces, metadata, rename_tensor),
        *(remove_tensor, reshape_tensor, retype_tensor, no_number, index, value, key_gone, white_space, config_family),
        *(config_architecture, config_code, config_heads, config_dtype, config_rope, config_vocabulary, config_tie),
        *(config_layers, config_ids, config_norm, config_quantised, config_nested, added_tokens, vocabulary, merges),
        *(tokenizer_part, tokenizer_class, template, generation, draft_record, progress),
    )
}
