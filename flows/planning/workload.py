"""The work of every step before it runs: operations, bytes moved, kept, held and sent. Arithmetic on settings alone.

Steps are gone through in order; how many rows and tokens one makes, those after it take over. Where an artifact exists
already its own counts are taken, so that the same arithmetic says what was done by steps whose time was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from components.bench.calibration import peak_of_weights, timed_bytes
from components.data.features.format import bytes_per_token
from components.data.sources.addresses import PREFIX
from components.drafts.training.ahead import RowLengths, TrainingAhead, precision_of, training_ahead
from components.drafts.training.batches import padded_length
from components.methods import AUTO, METHODS
from components.outside_json import JsonObject
from components.targets.generate import CACHE_BYTES, PREFILL_TOKENS
from components.targets.shape import FEWEST_LAYERS_OF_USUAL_TAPS, taps_of
from components.targets.size import TargetSize, size_of_model
from components.targets.source import local_folder

Kind = Literal["uncounted", "other", "data", "reading", "serving", "decoding", "passes", "training", "budget"]
Dtype = Literal["float32", "bfloat16"]
ITEMSIZE: Mapping[str, int] = {"float32": 4, "bfloat16": 2}

ROWS_PER_SECOND: Mapping[str, int] = {
    "data.collect_chats": 8000,
    "data.deduplicate": 33_000,
    "data.mix_chats": 20_000,
}
"""As benchmarks/results/datasets_at_scale-2026-11-21.json has them, on two cores."""
UNCOUNTED = frozenset(
    {"targets.pretrain_target", "targets.fine_tune_target", "bench.measure_server", "bench.measure_llama_cpp"}
)
"""Steps that take long, and whose work is not worked out."""
HASHED_PER_SECOND = 1e9
"""Bytes of weights that load_target reads and hashes in a second."""
STORED_BYTES_PER_TOKEN = 8
"""Of answers: ids, masks, labels; the built-in target's take 7.5."""
SENT_BYTES_PER_TOKEN = 8
"""Of a prompt or an answer that goes to or from a server as JSON."""
SERVED_SHARE = 0.85
"""Of a GPU's memory, for weights and cache of a server."""
MEMORY_FOLDER = "/dev/shm/"
"""Files under it are in memory."""
ONCE_AGAIN = 3
"""How many times as long as the mean the longest prompt is taken to be, within max_prompt_tokens."""
CHARACTERS_PER_TOKEN = 3
"""Of a long prompt: fewer than English text has."""
NUM_TAPS = len(taps_of(FEWEST_LAYERS_OF_USUAL_TAPS))
"""Layers that a drafter reads, where its settings do not say."""
MOST_AROUND = 7
"""Depths of one drafter that are tried "around" the chosen one, and of one whose depth is not known."""
WORKING_WIDTHS = 4
"""Copies of the widest layer's rows that a forward pass holds at once."""


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of the rows that nothing is known about yet.

    measured: here, and not assumed. num_seen: prompts of the source whose bytes were counted.
    """

    prompt_tokens: float = 256
    answer_share: float = 1.0
    """Of max_new_tokens."""
    conversation_tokens: float = 1000
    longest_test: float = 0
    """The longest test prompt; 0: not known."""
    measured: bool = False
    num_seen: int = 0


@dataclass(frozen=True)
class Stage:
    """A step of a plan, or one that was done. info: of its artifact; {} before it is made."""

    name: str
    address: str
    settings: JsonObject
    inputs: Mapping[str, tuple[str, ...]]
    info: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class Rows:
    """What data there is after a step. Lengths are means."""

    train: float = 0
    validation: float = 0
    test: float = 0
    prompt_tokens: float = 0
    answer_tokens: float = 0
    longest_prompt: float = 0
    longest_test: float = 0
    of_shard: int = 0
    """Answered together, in one file."""

    @property
    def answered(self) -> float:
        return self.train + self.validation

    @property
    def length(self) -> float:
        return self.prompt_tokens + self.answer_tokens

    @property
    def tokens(self) -> float:
        return self.answered * self.length


@dataclass
class Work:
    """Of one step. Of everything that is computed: per device, where `devices` share it evenly."""

    kind: Kind = "other"
    seconds: float = 0.0  # that settings or other rates give it, before any roofline
    flops: float = 0.0
    dtype: Dtype = "float32"
    moved: float = 0.0  # bytes of the device's memory
    linked: float = 0.0  # bytes that each device sends to others of its machine
    across: float = 0.0  # bytes that each machine sends to others
    tokens: float = 0.0  # that go through the target
    memory: dict[str, int] = field(default_factory=dict)  # of one device, by part, at the peak
    mapped: int = 0  # bytes of files that a process on a CPU has in memory, and gives back where others need it
    disk: int = 0
    sure_disk: int = 0  # of it, at least, whatever the data turn out to be
    network: int = 0
    devices: int = 1  # of all machines
    machines: int = 1
    beside: Work | None = None  # that a server does at the same time
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stream:
    """Features that a server computes while a drafter is trained. passes: over every row once; room: of its folder."""

    passes: Work
    bytes_per_token: int
    room: float
    folder: str


class Workload:
    """The work of steps, one after the other; earlier ones first."""

    def __init__(
        self,
        *,
        on_gpu: bool,
        memory: int,
        lengths: Mapping[str, Lengths],
        config_of: Callable[[str], str],
        count: int = 1,
        rough: bool = False,
        host_memory: int | None = None,
    ) -> None:
        """memory: bytes of a device; count: of devices. lengths: by the name of a step, or by `source_of` its prompts,
        where measured. host_memory: bytes beside GPUs; None: not known.

        config_of: a model's name -> what `size_of_model` finds its configuration by. rough: training is estimated by
        the number of its parameters, at once (training_ahead).
        """
        self.on_gpu, self.memory, self.lengths, self.config_of = on_gpu, memory, lengths, config_of
        self.count, self.rough, self.host_memory = count, rough, host_memory
        self.targets: dict[str, TargetSize] = {}
        self.shared: dict[str, tuple[int, bool]] = {}  # targets: among how many devices, and whether they work at once
        self.dtypes: dict[str, Dtype] = {}
        self.rows: dict[str, Rows] = {}
        self.counted: dict[str, bool] = {}  # answers: whether their tokens are known
        self.live: dict[str, bool] = {}  # features: whether training computes them
        self.stored: dict[str, int] = {}  # features: bytes of hidden states
        self.streams: dict[str, Stream] = {}  # features: of those that are streamed
        self.first_readers: dict[str, str] = {}  # features: the step that asks for those that then stay
        self.taps: dict[str, tuple[int, ...]] = {}
        self.sources: dict[str, str] = {}  # prompts: what they were collected from
        self.drafts: dict[str, TrainingAhead | None] = {}
        self.methods: dict[str, str] = {}  # drafts: how they draft
        self.assumed: dict[str, None] = {}  # in words, in the order in which they were needed

    def of(self, stage: Stage) -> Work:
        """The work of one stage."""
        method = str(stage.info.get("method") or stage.settings.get("method", ""))
        self.methods[stage.name] = self.methods.get(self._input(stage, "start_from"), "") if method == AUTO else method
        if (how := HOW.get(stage.address)) is not None:
            return self._among_devices(stage, how(self, stage))
        if stage.address.startswith("bench.") and "seconds" in stage.settings:
            return self._among_devices(stage, self._budgeted(stage))
        self._pass_on(stage)
        if stage.address in ROWS_PER_SECOND:
            rows = self._input_rows(stage, "chats").train
            return Work("data", seconds=rows / ROWS_PER_SECOND[stage.address])
        return Work("uncounted" if stage.address in UNCOUNTED else "other")

    def name_also(self, name: str, other: str) -> None:
        """Let what is known of one step be known by another name too."""
        rows = (self.rows, self.counted, self.live, self.stored, self.streams, self.taps)
        data = (self.targets, self.shared, self.dtypes, *rows)
        for table in (*data, self.drafts, self.methods):
            _also(table, name, other)

    def _among_devices(self, stage: Stage, work: Work) -> Work:
        """The work where its target is spread over GPUs: of those that work in turns, each waits for the others."""
        number, at_once = self.shared.get(self._input(stage, "target"), (1, False))
        is_whole = work.kind != "training" or self.live.get(self._input(stage, "features"), False)
        if number == 1 or not is_whole or "target" not in work.memory:
            return work
        size = self.targets[self._input(stage, "target")]
        itemsize = work.memory["target"] // size.num_params
        if at_once:  # the layers and a head of its own are cut, the embedding is not
            cut = size.num_in_layers + (0 if size.shape.tie_word_embeddings else size.num_in_head)
            share, linked = size.num_params - cut + cut // number, sent_within_layers(size, work, itemsize, number)
        else:  # whole layers, so one more here and there
            share = size.num_params // number + size.num_in_layers // size.shape.num_layers
            linked = work.tokens * size.shape.hidden_size * itemsize * (number - 1)
        memory = {**work.memory, "target": share * itemsize}
        if "cache" in memory:
            memory["cache"] //= number
        parts = number if at_once else 1
        return replace(
            work,
            memory=memory,
            flops=work.flops / parts,
            moved=work.moved / parts,
            linked=work.linked + linked,
            devices=max(number, work.devices),
        )

    def _input(self, stage: Stage, slot: str) -> str:
        return next(iter(stage.inputs.get(slot, ())), "")

    def _target(self, stage: Stage) -> TargetSize | None:
        return self.targets.get(self._input(stage, "target"))

    def _input_rows(self, stage: Stage, slot: str) -> Rows:
        rows = [self.rows.get(name, Rows()) for name in stage.inputs.get(slot, ())]
        first = rows[0] if rows else Rows()
        return replace(first, train=sum(each.train for each in rows))

    def _pass_on(self, stage: Stage) -> None:
        """A step that makes no data of its own hands on that of its input; drafts keep what they are."""
        for slot in ("prompts", "chats", "new", "answers", "features"):
            if slot in stage.inputs:
                self.rows[stage.name] = self._input_rows(stage, slot)
                break
        if "draft" in stage.inputs:
            self.drafts[stage.name] = self.drafts.get(self._input(stage, "draft"))

    def _load_target(self, stage: Stage) -> Work:
        model = str(stage.settings["model"])
        size = self.targets[stage.name] = cached_size(self.config_of(model))
        setting = stage.settings["dtype"]
        dtype: Dtype = ("bfloat16" if self.on_gpu else "float32") if setting == "auto" else setting
        self.dtypes[stage.name] = dtype
        tp_size, by_layers = stage.settings.get("tp_size", 1), stage.settings.get("device_map") == "auto"
        faults = []
        if self.on_gpu:
            self.shared[stage.name] = (self.count, False) if by_layers else (tp_size, True)
        elif by_layers:
            faults.append("device_map: auto spreads layers over GPUs, and this machine has none: leave it out")
        if not divides(tp_size, size):
            heads = f"{size.shape.num_attention_heads} and {size.shape.num_key_value_heads}"
            faults.append(
                f"tp_size: {tp_size} does not divide its {heads} heads: set tp_size: {most_parts(tp_size, size)}"
            )
        stored = 2 * size.num_params
        far = 0 if local_folder(model) is not None else stored
        notes = ("it is quantised: its weights are counted in bfloat16",) if size.is_quantised else ()
        seconds = stored / HASHED_PER_SECOND
        return Work("reading", seconds=seconds, disk=far, network=far, notes=notes, faults=tuple(faults))

    def _collect_prompts(self, stage: Stage) -> Work:
        self.sources[stage.name] = source_of(stage.settings)
        counts = {**stage.settings, **stage.info}
        rows = Rows(*(counts[f"num_{split}"] for split in ("train", "validation", "test")))
        self.rows[stage.name] = self._with_prompts(rows, stage)
        return Work("other", disk=round(1000 * (rows.answered + rows.test)))

    def _collect_workloads(self, stage: Stage) -> Work:
        num_test = stage.info.get("num_test") or stage.settings["num_prompts"] * len(stage.settings["sources"])
        self.rows[stage.name] = self._with_prompts(Rows(test=num_test), stage)
        return Work("other", notes=() if stage.info else ("counted as one workload for each source",))

    def _collect_chats(self, stage: Stage) -> Work:
        most = sum(source.get("max_rows") or 0 for source in stage.settings["sources"])
        self.rows[stage.name] = Rows(train=stage.info.get("num_rows") or most)
        far = any(_is_far(source) for source in stage.settings["sources"])
        notes = ("rows are counted by max_rows",) + (("its download is as large as the data set",) if far else ())
        return Work("data", seconds=most / ROWS_PER_SECOND[stage.address], notes=() if stage.info else notes)

    def _mix_chats(self, stage: Stage) -> Work:
        lengths, settings = self._lengths_of(stage), stage.settings
        chats = self._input_rows(stage, "chats").train
        limit = settings[f"limit_{settings['by']}"]
        if limit is not None:
            most = limit / lengths.conversation_tokens if settings["by"] == "tokens" else limit
            chats = min(chats, most) if chats else most
            if settings["by"] == "tokens":
                self._assume(f"a conversation has {lengths.conversation_tokens:,.0f} tokens", lengths.measured)
        rows = Rows(chats, settings["num_validation"], settings["num_test"])
        rows = replace(rows, **{name: stage.info[f"num_{name}"] for name in ("train",) if f"num_{name}" in stage.info})
        self.rows[stage.name] = self._with_prompts(rows, stage)
        return Work("data", seconds=chats / ROWS_PER_SECOND[stage.address], disk=round(4 * (limit or 0)))

    def _write_answers(self, stage: Stage) -> Work:
        size, rows = self._target(stage), self._answered(stage)
        if size is None:
            return _unknown_target()
        dtype = self.dtypes[self._input(stage, "target")]
        work = self._decoding(size, dtype, rows, rows.answered, stage.settings["batch_size"], not self.on_gpu)
        return replace(work, disk=round(rows.tokens * STORED_BYTES_PER_TOKEN))

    def _write_answers_by_server(self, stage: Stage) -> Work:
        size, rows = self._target(stage), self._answered(stage)
        if size is None:
            return _unknown_target()
        weights, together = 2 * size.num_params, stage.settings["concurrency"]
        room = max(0.0, SERVED_SHARE * self.memory * self._gpus_of_server(size) - weights)  # more than fits waits
        together = max(
            1, min(together, int(room / (size.kv_bytes * max(1.0, rows.longest_prompt + rows.answer_tokens))))
        )
        work = self._served(self._decoding(size, "bfloat16", rows, rows.answered, together, False), size)
        sent = round(rows.tokens * SENT_BYTES_PER_TOKEN)
        return replace(work, kind="serving", network=sent, disk=round(rows.tokens * STORED_BYTES_PER_TOKEN))

    def _gpus_of_server(self, size: TargetSize) -> int:
        """As few as hold its weights in bfloat16, and can share its heads."""
        if not self.on_gpu:
            return 1
        fewest = max(1, math.ceil(2 * size.num_params / (SERVED_SHARE * self.memory)))
        return next((n for n in range(fewest, size.shape.num_attention_heads + 1) if divides(n, size)), fewest)

    def _served(self, work: Work, size: TargetSize) -> Work:
        """The work where a server does it, whose GPUs share every layer."""
        number = self._gpus_of_server(size)
        on = f", on {number} GPU{'s' * (number > 1)}" if self.on_gpu else ""
        return replace(
            work,
            flops=work.flops / number,
            moved=work.moved / number,
            linked=sent_within_layers(size, work, ITEMSIZE[work.dtype], number),
            memory={f"server's {name}": part // number for name, part in work.memory.items()},
            devices=number,
            notes=(f"its server is taken to run here{on}",),
        )

    def _write_given_answers(self, stage: Stage) -> Work:
        rows = self._answered(stage)
        return Work("other", disk=round(rows.tokens * STORED_BYTES_PER_TOKEN))

    def _record_features(self, stage: Stage) -> Work:
        work = self._features(stage, stage.settings["tokens_per_pass"])
        rows, size = self.rows[stage.name], self._target(stage)
        if size is None:
            return work
        each = bytes_per_token(size.shape.hidden_size, stage.settings["storage"], len(self.taps[stage.name]))
        self.stored[stage.name] = round(rows.tokens * each)
        notes = (
            f"{each / 1e3:.1f} kB a token on disk; data.features_on_the_fly stores none and would save"
            f" {in_bytes(rows.tokens * each)}",
        )
        disk = round(rows.tokens * each)
        sure = disk if self.counted.get(self._input(stage, "answers"), False) else 0
        return replace(work, disk=disk, sure_disk=sure, notes=notes)

    def _features_on_the_fly(self, stage: Stage) -> Work:
        work = self._features(stage, stage.settings["tokens_per_pass"])
        self.live[stage.name] = True
        size = self._target(stage)
        return work if size is None else self._not_stored(stage, size, "training computes them instead")

    def _not_stored(self, stage: Stage, size: TargetSize, instead: str) -> Work:
        """Of a step that keeps tokens and masks alone."""
        num_taps, tokens = len(self.taps[stage.name]), self.rows[stage.name].tokens
        each = bytes_per_token(size.shape.hidden_size, "bf16", num_taps)
        note = f"stored they would take {each / 1e3:.1f} kB a token, {in_bytes(tokens * each)} on disk; {instead}"
        return Work("other", disk=round(tokens * bytes_per_token(0, "none", num_taps)), notes=(note,))

    def _features_from_server(self, stage: Stage) -> Work:
        rows, size, settings = self._input_rows(stage, "answers"), self._target(stage), stage.settings
        longest = max(1.0, rows.longest_prompt + rows.answer_tokens)  # of which the server has one in a pass, or more
        work = self._features(stage, longest, served=True)
        if size is None:
            return work
        num_taps, width = len(self.taps[stage.name]), size.shape.hidden_size
        sent, stored = (num_taps + 1) * 2 * width, bytes_per_token(width, settings["storage"], num_taps)
        work = self._served(work, size)
        if settings["storage"] == "none":
            self.streams[stage.name] = Stream(work, sent, settings["buffer_gb"] * 1e9, settings["folder"])
            return self._not_stored(stage, size, "training asks the server for them instead")
        self.stored[stage.name] = round(rows.tokens * stored)
        head = size.num_kept * ITEMSIZE[self.dtypes[self._input(stage, "target")]] if settings["num_checked"] else 0
        notes = (
            f"{sent / 1e3:.1f} kB of each of {rows.tokens:,.0f} tokens come from the server (its fp8 connector would"
            " halve that)",
            f"{stored / 1e3:.1f} kB a token on disk; storage: none stores none and would save"
            f" {in_bytes(rows.tokens * stored)}, and asks again in each epoch for what buffer_gb does not hold",
        )
        work = replace(
            work,
            memory={**work.memory, "the target's head": head},
            disk=round(rows.tokens * stored),
            network=round(rows.tokens * sent),
            notes=(*work.notes, *notes),
        )
        waiting = min(rows.answered, rows.of_shard + settings["concurrency"]) * rows.length * sent
        return self._with_folder(work, settings["folder"], waiting)

    def _with_folder(self, work: Work, folder: str, size: float) -> Work:
        """The work, with what lies in a server's folder until it is read."""
        in_memory = folder.startswith(MEMORY_FOLDER)
        what = f"{folder} holds up to {in_bytes(size)}, {'of the memory' if in_memory else 'of the disk'} of its host"
        memory, faults = work.memory, work.faults
        if in_memory and not self.on_gpu:
            memory = {**memory, "the server's folder": round(size)}
        elif in_memory and size > (self.host_memory or math.inf):
            faults += (f"{what}, which has {in_bytes(self.host_memory or 0)}: set folder to one on a disk",)
        return replace(work, memory=memory, notes=(*work.notes, what), faults=faults)

    def _while_served(self, stage: Stage, work: Work, num_rows: float) -> Work:
        """Training that reads so many rows, with the server that hands them out where they are streamed."""
        features = self._input(stage, "features")
        if (stream := self.streams.get(features)) is None:
            return work
        rows, passes = self.rows[features], stream.passes
        whole, tokens = rows.tokens * stream.bytes_per_token, num_rows * rows.length
        if whole <= stream.room:  # what has come stays, for the next drafter too
            is_first = self.first_readers.setdefault(features, stage.name) == stage.name
            tokens = min(tokens, rows.tokens) if is_first else 0.0
        share = tokens / max(1.0, rows.tokens)
        beside = replace(
            passes, flops=share * passes.flops, moved=share * passes.moved, linked=share * passes.linked, tokens=tokens
        )
        sent = f"{stream.bytes_per_token / 1e3:.1f} kB a token come from the server, {share:.1f} times what is answered"
        streaming = replace(
            work,
            beside=beside,
            memory=work.memory if self.on_gpu else {**work.memory, **passes.memory},
            network=round(tokens * stream.bytes_per_token),
            devices=work.devices + (passes.devices if self.on_gpu else 0),
            notes=(*work.notes, *passes.notes, sent),
        )
        return self._with_folder(streaming, stream.folder, min(whole, stream.room))

    def _train_draft(self, stage: Stage) -> Work:
        features, size, settings = self._input(stage, "features"), self._target(stage), stage.settings
        rows = self.rows.get(features, Rows())
        self.drafts[stage.name] = None
        if size is None:
            return _unknown_target()
        if (method := self.methods[stage.name]) not in METHODS:
            return Work("uncounted", notes=("its method is that of a drafter that is not there yet",))
        if not features or not METHODS[method].trained:
            return Work("other")
        dtype = self.dtypes[self._input(stage, "target")]
        lengths = RowLengths(max(8, round(rows.length)), max(2, round(rows.answer_tokens)))
        precision = precision_of(settings["precision"], on_gpu=self.on_gpu)
        taps = self.taps.get(features) or taps_of(size.shape.num_layers)
        ahead = cached_ahead(size, _Frozen({**settings, "method": method}), lengths, taps, dtype, precision, self.rough)
        self.drafts[stage.name] = ahead
        if ahead is None:
            return Work("uncounted", notes=("it is given its model, or fine-tunes what its target brings",))
        steps, processes = settings["num_steps"], settings["processes"]
        ranks = processes * settings["nodes"]
        looks = steps / settings["eval_every"] * min(settings["eval_rows"], rows.validation or 1e9)
        flops = steps * ahead.flops_of_step + looks * ahead.flops_of_row
        of_a_part = 3 * ahead.weight_bytes + 2 * ahead.peak.activations
        moved = steps * ranks * (ahead.num_parts * of_a_part + 7 * ahead.weight_bytes)
        parts = {
            "weights": ahead.weight_bytes,
            "the target's head": ahead.frozen_bytes,
            "gradients": ahead.peak.gradients,
            "optimiser": ahead.peak.optimiser,
            "features": ahead.peak.features,
            "activations": ahead.peak.activations,
            "logits": ahead.peak.logits,
        }
        target_bytes = (size.num_params if self.live.get(features) else size.num_kept) * ITEMSIZE[dtype]
        memory = {"target": target_bytes, **parts}
        notes = [f"{ahead.num_parameters / 1e6:,.0f} M parameters"]
        if self.live.get(features) and sum(memory.values()) > self.memory:
            notes.append("with data.record_features it would hold of its target the embedding, norm and head alone")
        through = 0.0
        if self.live.get(features):
            tokens = steps * ahead.tokens_of_step
            through = tokens
            flops += size.flops(tokens, rows.length / 2, 0)
            moved += tokens / settings["batch_tokens"] * size.num_read(settings["batch_tokens"]) * ITEMSIZE[dtype]
        if not self.on_gpu:  # processes share the machine
            memory = {name: part * processes for name, part in memory.items()}
        nodes = settings["nodes"]
        devices = ranks if self.on_gpu else nodes
        # Around a ring: sums of gradients (in shares: sums and weights), and what Muon's owners have stepped.
        is_shared = settings["sharding"] == "full"
        sent = steps * (ranks - 1) / ranks * (2 * ahead.weight_bytes + (0 if is_shared else ahead.muon_bytes))
        if is_shared and ranks > 1 and ahead.muon_bytes:
            notes.append("what Muon sends to step shares is not counted")
        rows_read = steps * ahead.tokens_of_step / padded_length(min(lengths.tokens, settings["max_tokens"]))
        work = Work(
            "training",
            flops=flops / devices,
            dtype=precision,
            moved=moved / devices,
            linked=sent if self.on_gpu and processes > 1 else 0.0,
            across=sent if nodes > 1 else 0.0,
            tokens=through,
            memory=memory,
            mapped=0 if self.on_gpu else self.stored.get(features, 0),
            disk=5 * ahead.weight_bytes,  # the checkpoint with its moments, the best weights and the drafter
            sure_disk=ahead.weight_bytes,
            devices=devices,
            machines=nodes,
            notes=tuple(notes),
        )
        return self._while_served(stage, work, rows_read + min(settings["eval_rows"], rows.validation))

    def _measure_acceptance(self, stage: Stage) -> Work:
        """Prompts are answered, in bounded caches; then the states of one whole text after the other are computed."""
        size = self._target(stage)
        if size is None:
            return _unknown_target()
        settings, dtype = stage.settings, stage.settings["dtype"]
        prompts = self._input_rows(stage, "prompts")
        rows = replace(
            prompts,
            answer_tokens=settings["max_new_tokens"] * self._lengths_of(stage).answer_share,
            longest_prompt=min(
                prompts.longest_test or ONCE_AGAIN * prompts.prompt_tokens, size.shape.max_position_embeddings
            ),
        )
        work = self._decoding(size, dtype, rows, rows.test, settings["batch_size"], True)
        longest, memory = rows.longest_prompt + rows.answer_tokens, dict(work.memory)
        memory["states"] = round(longest * size.shape.hidden_size * (1 + NUM_TAPS) * ITEMSIZE[dtype])
        ahead = self.drafts.get(self._input(stage, "draft"))
        if ahead is None:
            return replace(work, memory=memory)
        memory["drafter"] = held_by_drafter(ahead, dtype)
        return replace(work, flops=work.flops + rows.test * ahead.flops_of_row, memory=memory)

    def _budgeted(self, stage: Stage) -> Work:
        """A measurement that has a time budget: no longer than that, but for opening its processes."""
        size = self._target(stage)
        if size is None:
            return _unknown_target()
        settings, dtype = stage.settings, stage.settings["dtype"]
        drafted = [self.drafts.get(name) for name in stage.inputs.get("drafts", ())]
        sizes = [held_by_drafter(ahead, dtype) for ahead in drafted if ahead is not None]
        weights = size.num_params * ITEMSIZE[dtype]
        memory = {"target": weights}
        if stage.address == "bench.autotune":  # one drafter after the other
            timed = 0 if self.on_gpu else peak_of_weights(weights) - weights + (timed_bytes() if sizes else 0)
            memory |= {"drafter": max(sizes, default=0), "kernels that are timed": timed}
        else:
            tests = self._input_rows(stage, "prompts")
            longest = tests.longest_test or ONCE_AGAIN * tests.prompt_tokens
            lengths = [longest + settings["max_new_tokens"]] if "max_new_tokens" in settings else []
            lengths += [length + settings["tokens_per_block"] for length in settings.get("kv_lengths", ())]
            longest = min(max(lengths, default=0), size.shape.max_position_embeddings)
            rows = longest * max(settings.get("batch_sizes", (1,)), default=1)
            arms = arms_of(settings, [ahead.depth if ahead else None for ahead in drafted])
            memory |= {"drafters": sum(sizes), "caches": round(arms * rows * size.kv_bytes * ITEMSIZE[dtype] / 2)}
        return Work("budget", seconds=settings["seconds"], dtype=dtype, memory=memory)

    def _export_release(self, stage: Stage) -> Work:
        drafted = [self.drafts.get(name) for name in stage.inputs.get("drafts", ())]
        largest = max((ahead.weight_bytes for ahead in drafted if ahead is not None), default=0)
        # A format is written whole, from a file that is mapped, and is then read again to be checked.
        return Work("other", disk=2 * largest, memory={"drafter": largest}, mapped=2 * largest)

    def _answered(self, stage: Stage) -> Rows:
        """The rows after a step that answers its prompts; it notes them."""
        lengths, prompts = self._lengths_of(stage), self._input_rows(stage, "prompts")
        most = stage.settings.get("max_new_tokens") or stage.settings.get("max_tokens", 0)
        rows = replace(prompts, answer_tokens=lengths.answer_share * most, of_shard=stage.settings.get("shard_size", 0))
        self.counted[stage.name] = bool(stage.info)
        if stage.info:
            counts = stage.info["num_rows"]
            answered = sum(counts.values())
            answer = stage.info["num_answer_tokens"] / answered
            prompt = stage.info["num_tokens"] / answered - answer
            means: JsonObject = {"prompt_tokens": prompt, "answer_tokens": answer}
            rows = replace(rows, train=counts.get("train", 0), validation=counts.get("validation", 0), **means)
        else:
            self._assume(f"answers have {rows.answer_tokens:,.0f} tokens", lengths.measured)
            if lengths.measured or not rows.prompt_tokens:
                rows = replace(rows, prompt_tokens=lengths.prompt_tokens)
            self._assume(f"prompts have {rows.prompt_tokens:,.0f} tokens", lengths.measured, lengths.num_seen)
        longest = min(stage.settings.get("max_prompt_tokens", math.inf), ONCE_AGAIN * rows.prompt_tokens)
        self.rows[stage.name] = replace(rows, longest_prompt=longest)
        return self.rows[stage.name]

    def _features(self, stage: Stage, at_once: float, *, served: bool = False) -> Work:
        """The passes over so many tokens at once that compute hidden states."""
        size, rows = self._target(stage), self._input_rows(stage, "answers")
        self.rows[stage.name] = rows
        if size is None:
            self.taps[stage.name] = ()
            return _unknown_target()
        taps = stage.settings["tap_layers"]
        self.taps[stage.name] = tuple(taps) if taps else taps_of(size.shape.num_layers)
        dtype: Dtype = "bfloat16" if served else self.dtypes[self._input(stage, "target")]
        width = size.shape.hidden_size * (len(self.taps[stage.name]) + 1)
        itemsize = ITEMSIZE[dtype]
        return Work(
            "passes",
            flops=size.flops(rows.tokens, rows.length / 2, 0),
            tokens=rows.tokens,
            dtype=dtype,
            moved=rows.tokens / at_once * size.num_read(at_once) * itemsize,
            memory={
                "target": size.num_params * itemsize,
                "cache": round(at_once * size.kv_bytes * itemsize / 2),
                "states": round(at_once * width * itemsize),
                "activations": round(
                    at_once * WORKING_WIDTHS * max(size.shape.intermediate_size, size.shape.hidden_size) * itemsize
                ),
            },
        )

    def _decoding(self, size: TargetSize, dtype: Dtype, rows: Rows, answered: float, batch: int, bound: bool) -> Work:
        """Prefills and token by token: every pass reads all weights, and of the cache what its rows have so far.

        bound: whether only as many rows are in the cache as CACHE_BYTES hold."""
        itemsize, tokens = ITEMSIZE[dtype], answered * rows.answer_tokens
        kv, context = size.kv_bytes * itemsize / 2, rows.prompt_tokens + rows.answer_tokens / 2
        longest_prompt = max(rows.longest_prompt, rows.prompt_tokens)
        of_row = (longest_prompt + rows.answer_tokens) * kv
        together = max(1.0, min(batch, answered, CACHE_BYTES[self._device] // of_row if bound else math.inf))
        prefill = size.flops(answered * rows.prompt_tokens, rows.prompt_tokens / 2, answered)
        moved = tokens / together * (size.num_read(together) + size.num_in_head) * itemsize + tokens * context * kv
        at_once = max(longest_prompt, min(PREFILL_TOKENS[self._device], together * longest_prompt))
        width = WORKING_WIDTHS * max(size.shape.intermediate_size, size.shape.hidden_size)
        return Work(
            "decoding",
            flops=prefill + size.flops(tokens, context, tokens),
            tokens=answered * rows.prompt_tokens + tokens,
            dtype=dtype,
            moved=moved,
            memory={
                "target": size.num_params * itemsize,
                "cache": round(together * of_row),
                "prompts read at once": round(at_once * (kv + width * itemsize)),
                "logits": round(together * size.shape.vocab_size * 4),
            },
        )

    def _with_prompts(self, rows: Rows, stage: Stage) -> Rows:
        lengths, most = self._lengths_of(stage), stage.settings.get("max_prompt_characters") or 0
        mean, longest = lengths.prompt_tokens, lengths.longest_test or most / CHARACTERS_PER_TOKEN
        if lengths.num_seen:  # of the text itself, which may be Chinese: a token a character
            longest = max(longest, mean)
        elif longest and not lengths.measured:
            mean = min(mean, longest)
        return replace(rows, prompt_tokens=mean, longest_test=longest)

    @property
    def _device(self) -> str:
        return "cuda" if self.on_gpu else "cpu"

    def _lengths_of(self, stage: Stage) -> Lengths:
        source = self.sources.get(stage.name) or self.sources.get(self._input(stage, "prompts"), "")
        return self.lengths.get(stage.name) or self.lengths.get(source) or Lengths()

    def _assume(self, what: str, measured: bool, num_seen: int = 0) -> None:
        seen = f" (by the bytes of the first {num_seen} of them)" if num_seen else " (assumed)"
        self.assumed[f"{what}{', as measured here' if measured else seen}"] = None


HOW: Mapping[str, Callable[[Workload, Stage], Work]] = {
    "bench.measure_acceptance": Workload._measure_acceptance,
    "data.collect_chats": Workload._collect_chats,
    "data.collect_prompts": Workload._collect_prompts,
    "data.collect_traffic": Workload._collect_prompts,
    "data.collect_workloads": Workload._collect_workloads,
    "data.features_from_server": Workload._features_from_server,
    "data.features_on_the_fly": Workload._features_on_the_fly,
    "data.mix_chats": Workload._mix_chats,
    "data.record_features": Workload._record_features,
    "data.write_answers": Workload._write_answers,
    "data.write_answers_by_server": Workload._write_answers_by_server,
    "data.write_given_answers": Workload._write_given_answers,
    "drafts.train_draft": Workload._train_draft,
    "publish.export_release": Workload._export_release,
    "targets.load_target": Workload._load_target,
}
"""Address of a step -> how its work is worked out; of others the time alone is told, as it was or is assumed."""


def divides(number: int, size: TargetSize) -> bool:
    """Whether so many processes can share a target's heads (`tp_size`)."""
    return size.shape.num_attention_heads % number == 0 == size.shape.num_key_value_heads % number


def most_parts(number: int, size: TargetSize) -> int:
    """The largest tp_size of at most `number`."""
    return next(parts for parts in range(number, 0, -1) if divides(parts, size))


def sent_within_layers(size: TargetSize, work: Work, itemsize: int, number: int) -> float:
    """Bytes that each of the devices that share every layer sends: two sums over all in a layer, around a ring."""
    state = work.tokens * size.shape.hidden_size * itemsize
    return 2 * size.shape.num_layers * 2 * state / number * (number - 1)


def held_by_drafter(ahead: TrainingAhead, dtype: Dtype) -> int:
    """Bytes of an opened drafter: its weights as they were trained, and as it decodes with them."""
    return ahead.num_parameters * (4 + ITEMSIZE[dtype]) + ahead.frozen_bytes


def arms_of(settings: JsonObject, trained_depths: Sequence[int | None]) -> int:
    """Ways of decoding that take turns, plain decoding included, each of which keeps a cache of its own."""
    of_any = len(settings.get("trees", ())) + settings.get("loaded_off", False) + settings.get("stop_rule", False)
    depths, most = settings.get("depths", "all"), settings.get("max_depth") or math.inf
    around = MOST_AROUND if depths == "around" else most
    tried = [len(depths) if isinstance(depths, list) else min(depth or MOST_AROUND, around) for depth in trained_depths]
    return round(1 + len(settings.get("lookup_depths", ())) + sum(tried) + of_any * len(tried))


def source_of(settings: JsonObject) -> str:
    """What tells the prompts of a step from others, by its settings; "" for one that collects none."""
    return f"from {settings['source']}" if "source" in settings else ""


def _also(table: dict[str, Any], name: str, other: str) -> None:
    if name in table:
        table[other] = table[name]


def _unknown_target() -> Work:
    return Work("uncounted", notes=("the size of its target is not known before the target is there",))


def _is_far(source: Mapping[str, Any]) -> bool:
    path = str(source.get("path") or "")
    return not path or "://" in path or path.startswith(PREFIX)


class _Frozen(dict[str, Any]):
    """Settings as a key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=repr)))


cached_size = cache(size_of_model)


@cache
def cached_ahead(
    size: TargetSize,
    settings: _Frozen,
    rows: RowLengths,
    taps: tuple[int, ...],
    dtype: Dtype,
    precision: Dtype,
    rough: bool,
) -> TrainingAhead | None:
    """As training_ahead, worked out once for each case."""
    return training_ahead(size.shape, settings, rows, taps, dtype=dtype, precision=precision, rough=rough)


def in_bytes(number: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f} B"
