"""Step `bench.measure_llama_cpp`: measures llama.cpp's command-line programs on the same workloads.

Every prompt runs through llama-completion (plain) and llama-speculative-simple at each depth, in random order, one
process a run, so no cache is shared between runs. A run whose program read other tokens than the target's tokenizer
gives becomes an error row. For a running llama-server use bench.measure_server.

Rows are a Request for each run, and the counts of each workload and depth, as the programs print them:
llama-speculative-simple ends with "encoded N tokens in S seconds", "decoded N tokens in S seconds", n_drafted, n_accept
and, at verbosity 4, a line of statistics with the rounds that drafted and the acceptance rate of each position. Plain
decoding (llama-completion, formerly llama-cli) ends with llama.cpp's own timings with --perf.

Seconds have three decimals: a decode time is known to a millisecond. Every token of llama-speculative-simple comes from
its decoding loop, so its decode time includes the pass that makes the first token.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from components.bench.engines.acceptance import Acceptance
from components.bench.engines.connect import ServerPrompt
from components.bench.engines.rows import decode_expected
from components.bench.engines.server import server_prompt
from components.bench.prompts import EncodedPrompt, fitting_prompts, num_positions, spread_by_workload, warm_up_prompts
from components.bench.settings import DraftDepths, SpeculationType
from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError
from components.outside_json import JsonObject
from components.rows import EngineAcceptance, Request, grouped, write_rows
from components.targets.load import open_tokenizer
from components.targets.remembered import sha256_of

_METHODS: Final[dict[str, str]] = {
    "draft-simple": "draft-model",
    "draft-eagle3": "eagle3",
    "draft-dflash": "dflash",
    "draft-dspark": "dspark",
    "draft-mtp": "mtp",
}
_PLAIN: Final = ("llama-completion", "llama-cli")
_SPECULATIVE: Final = "llama-speculative-simple"
_LIBRARIES: Final = ("libllama*.so*", "libggml*.so*", "libmtmd*.so*")
"""Only these names, since ../lib may be the system's."""
_ATTEMPTS: Final = 8
"""Most runs of a program that exits with 0 without its counts: it may cut off its log at exit (its issue 22142)."""


def measure_llama_cpp(
    target: Target,
    prompts: Prompts,
    draft: Draft | None,
    *,
    model: str,
    draft_model: str,
    speculation: SpeculationType,
    draft_key: str,
    depths: DraftDepths,
    programs: str,
    num_prompts: int,
    max_new_tokens: int,
    reps: int,
    num_warm_up: int,
    num_threads: int,
    num_compared: int,
    timeout_s: float,
    dtype: str,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """The step `bench.measure_llama_cpp`; its settings are explained in components/bench/steps.py."""
    tools = Tools.locate(programs, model, draft_model, depths)
    version = read_version(version_output(tools.plain))
    fitting = fitting_prompts(target, prompts, "test", max_new_tokens + max(depths, default=0) + 2, ctx)
    timed = spread_by_workload(fitting, num_prompts)
    warm_up = warm_up_prompts(target, prompts, timed, num_warm_up, max_new_tokens, ctx)
    tokenizer = open_tokenizer(target)
    plan = _plan_runs(warm_up, timed, depths, reps, ctx.seed)
    ctx.note(f"{len(plan)} runs of {tools.speculative if depths else tools.plain}, one process each")
    settings = Settings(
        model,
        draft_model,
        speculation,
        max_new_tokens,
        num_positions(target),
        num_threads or ctx.num_threads,
        timeout_s,
    )
    runs: list[Run] = []
    for rep, is_warmup, prompt, depth in plan:
        runs.append(_run_program(tools, settings, tokenizer, prompt, depth, rep, is_warmup, ctx.scratch / "prompt.txt"))
        ctx.progress(len(runs), len(plan), "runs")
    if all(run.printed is None for run in runs):
        raise UserError(f"{_SPECULATIVE}: every run failed; the first: {runs[0].error}")
    draft_key = draft.key if draft is not None else draft_key
    shared = SessionFacts(
        ctx.key[:16], target.key, draft_key, _METHODS[speculation], version, dtype, settings.num_threads, max_new_tokens
    )
    requests = shared.requests(runs, _expected_texts(target, runs, tokenizer, num_compared, max_new_tokens, ctx))
    write_rows(ctx.out, [*requests, *shared.acceptance(runs)])
    return Measurements.of_step(
        ctx,
        {
            "engine": f"llama.cpp {version}".strip(),
            "num_prompts": len(timed),
            "num_runs": len(runs),
            "num_failed": sum(row.status == "error" for row in requests),
            "machine_id": machine.machine_id,
            "num_threads": settings.num_threads,
        },
    )


def _plan_runs(
    warm_up: Sequence[EncodedPrompt], timed: Sequence[EncodedPrompt], depths: Sequence[int], reps: int, seed: int
) -> list[tuple[int, bool, EncodedPrompt, int]]:
    """(rep, is_warmup, prompt, depth) of every run: warm-up first, then each prompt at all depths in random order."""
    order = random.Random(seed)
    plan = [(0, True, prompt, depth) for prompt in warm_up for depth in (0, *depths)]
    for rep in range(reps):
        for prompt in timed:
            plan += [(rep, False, prompt, depth) for depth in order.sample([0, *depths], 1 + len(depths))]
    return plan


def measure_llama_cpp_fingerprint(settings: JsonObject) -> dict[str, str]:
    """The GGUF files, programs and libraries that the settings name, for the step's key: file -> sha256."""
    model, draft = str(settings["model"]), str(settings.get("draft_model", ""))
    depths = settings.get("depths", [3, 7])
    tools = Tools.locate(str(settings.get("programs", "")), model, draft, depths)
    used = [tools.plain, *([tools.speculative] if depths else [])]
    files = [model, *([draft] if draft else []), *used, *_libraries(used)]
    return {str(file): sha256_of(Path(file).expanduser()) for file in files}


@dataclass(frozen=True)
class Tools:
    """Paths of the programs."""

    plain: str
    speculative: str

    @classmethod
    def locate(cls, programs: str, model: str, draft_model: str, depths: Sequence[int]) -> Tools:
        """Find the programs; raises UserError for a missing program or model file."""
        for setting, file in (("model", model), ("draft_model", draft_model)):
            if file and not Path(file).expanduser().is_file():
                raise UserError(f"{setting}: {file}: no such file; convert the model with convert_hf_to_gguf.py")
        search_path = str(Path(programs).expanduser()) if programs else None
        plain = next((path for name in _PLAIN if (path := shutil.which(name, path=search_path))), None)
        speculative = shutil.which(_SPECULATIVE, path=search_path)
        missing = [_PLAIN[0]] * (plain is None) + [_SPECULATIVE] * (speculative is None and bool(depths))
        if missing:
            raise UserError(
                f"programs: {programs or 'PATH'}: no {' and no '.join(missing)}; build llama.cpp, or name it"
            )
        return cls(str(plain), speculative or "")


@dataclass(frozen=True)
class Settings:
    """Settings of all runs."""

    model: str
    draft_model: str
    speculation: str
    max_new_tokens: int
    num_positions: int
    num_threads: int
    timeout_s: float

    def command(self, tools: Tools, depth: int, prompt_file: Path) -> list[str]:
        """The command line of one run. llama.cpp drops the last line feed of a prompt file."""
        shared = ["-m", str(Path(self.model).expanduser()), "-f", str(prompt_file), "--no-escape", "--temp", "0"]
        shared += ["-c", str(self.num_positions), "-t", str(self.num_threads)]
        if depth == 0:
            plain = ["-n", str(self.max_new_tokens), "-no-cnv", "--no-display-prompt", "--perf"]
            return [tools.plain, *shared, *plain]
        draft = ["-md", str(Path(self.draft_model).expanduser())] if self.draft_model else []
        # The program stops after more than n tokens; -n max - 1 makes its last round end at max_new_tokens.
        limit = ["-n", str(self.max_new_tokens - 1), "-lv", "4"]
        spec = ["--spec-type", self.speculation, "--spec-draft-n-max", str(depth), "--spec-draft-p-min", "0"]
        return [tools.speculative, *shared, *draft, *spec, *limit]


def _run_program(
    tools: Tools,
    settings: Settings,
    tokenizer: Any,
    prompt: EncodedPrompt,
    depth: int,
    rep: int,
    is_warmup: bool,
    prompt_file: Path,
) -> Run:
    """Run one process; every failure becomes a Run with its reason."""
    text = server_prompt(tokenizer, prompt).text
    if text is None:
        return Run(prompt, depth, rep, is_warmup, None, "", "no text encodes to these tokens")
    prompt_file.write_text(text + "\n", encoding="utf-8", newline="")
    command = settings.command(tools, depth, prompt_file)
    for _ in range(_ATTEMPTS):
        try:
            finished = subprocess.run(command, capture_output=True, timeout=settings.timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return Run(prompt, depth, rep, is_warmup, None, "", f"no end within {settings.timeout_s:g} s")
        log, output = finished.stderr.decode("utf-8", "replace"), finished.stdout.decode("utf-8", "replace")
        printed = read_speculative(log) if depth else read_plain(log)
        if finished.returncode != 0 or printed is not None:
            break
    if finished.returncode != 0 or printed is None:
        last = next((line for line in reversed(log.splitlines()) if line.strip()), "nothing")
        message = f"exit {finished.returncode} without its counts, its last line: {last.strip()[:200]}"
        return Run(prompt, depth, rep, is_warmup, None, "", message)
    if printed.prompt_tokens != len(prompt.ids):
        message = f"it saw {printed.prompt_tokens} prompt tokens, the target's tokenizer {len(prompt.ids)}"
        return Run(prompt, depth, rep, is_warmup, None, "", message)
    answer = output.lstrip("\n") if depth == 0 else output.removeprefix("\n\n").removeprefix(text)
    return Run(prompt, depth, rep, is_warmup, printed, answer, None)


def _libraries(programs: Sequence[str]) -> list[str]:
    """llama.cpp's shared libraries beside its programs and in ../lib, sorted."""
    folders = {
        folder for name in programs for folder in (Path(name).resolve().parent, Path(name).resolve().parent / "../lib")
    }
    files = {file.resolve() for folder in folders for name in _LIBRARIES for file in folder.glob(name)}
    return sorted(str(file) for file in files if file.is_file())


def version_output(program: str, timeout_s: float = 60.0) -> str:
    """The output of a program's --version; raises UserError if it cannot be run or does not end."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"programs: {program}: --version did not end within {timeout_s:g} s; build it again") from error
    except OSError as error:
        raise UserError(f"programs: {program}: cannot be run ({error.strerror}); build it for this machine") from error
    return (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")


def _expected_texts(
    target: Target, runs: Sequence[Run], tokenizer: Any, num_compared: int, max_new_tokens: int, ctx: Context
) -> dict[str, str]:
    """prompt_id -> the text of our own plain greedy answer, for the first prompts of each workload."""
    timed = {run.prompt.prompt_id: run.prompt for run in runs if not run.is_warmup}
    server_prompts = [ServerPrompt(p.prompt_id, p.workload, p.ids, None) for p in timed.values()]
    expected = decode_expected(target, server_prompts, num_compared, max_new_tokens, "float32", ctx)
    if expected is None:
        return {}
    return {name: tokenizer.decode(ids, skip_special_tokens=True) for name, ids in expected.tokens.items()}


@dataclass(frozen=True)
class Run:
    """One process: its input and its output. error is the reason where printed is None."""

    prompt: EncodedPrompt
    depth: int
    rep: int
    is_warmup: bool
    printed: ProgramOutput | None
    output: str
    error: str | None


@dataclass(frozen=True)
class SessionFacts:
    """Columns that all rows of one session share."""

    session_id: str
    target_key: str
    draft_key: str
    method: str
    version: str
    dtype: str
    num_threads: int
    max_new_tokens: int

    def requests(self, runs: Sequence[Run], expected: Mapping[str, str]) -> list[Request]:
        """One row a run, in the order in which they ran. expected: prompt_id -> our own greedy text."""
        return [self._request(number, run, expected.get(run.prompt.prompt_id)) for number, run in enumerate(runs)]

    def _request(self, number: int, run: Run, expected: str | None) -> Request:
        printed = run.printed
        counts = printed.acceptance if printed is not None else None
        # The speculative program's prefill leaves the last prompt token to its decoding loop, so decode_ns makes all n
        # tokens. Rates count n - 1 tokens, as if prefill made the first: a mean token's time moves to ttft_ns.
        first_ns = round(printed.decode_ns / printed.tokens) if printed is not None and run.depth else 0
        identical = None
        if printed is not None and expected is not None and not run.is_warmup:
            output, wanted_text = run.output.strip(), expected.strip()
            # the program may run past the limit by a round: then its answer only begins with ours
            ran_on = printed.tokens > self.max_new_tokens
            identical = output.startswith(wanted_text) if ran_on else output == wanted_text
        return Request(
            session_id=self.session_id,
            request_id=f"{self.session_id}-{number:06d}",
            target_key=self.target_key,
            draft_key=self.draft_key if run.depth else "",
            method=self.method if run.depth else "none",
            depth_k=run.depth,
            prompt_id=run.prompt.prompt_id,
            workload=run.prompt.workload,
            batch_size=1,
            rep=run.rep,
            order_index=number,
            is_warmup=run.is_warmup,
            status="error" if printed is None else "ok" if printed.tokens >= self.max_new_tokens else "eos",
            prompt_tokens=len(run.prompt.ids),
            tokens_kept=min(printed.tokens, self.max_new_tokens) if printed else 0,
            tokens_raw=printed.tokens if printed else 0,
            num_rounds=counts.num_rounds if counts else 0,
            num_drafted=counts.num_drafted if counts else 0,
            num_accepted=counts.num_accepted if counts else 0,
            ttft_ns=printed.prefill_ns + first_ns if printed else 0,
            decode_ns=printed.decode_ns - first_ns if printed else 0,
            output_sha256=hashlib.sha256(run.output.encode()).hexdigest(),
            identical=identical,
            first_divergence=None,
            tie=None,
            dtype=self.dtype,
            kernel=f"llama.cpp {self.version}".strip(),
            num_threads=self.num_threads,
            temperature=0.0,
            engine="llama.cpp",
            engine_version=self.version,
            concurrency=1,
            error=run.error,
        )

    def acceptance(self, runs: Sequence[Run]) -> list[EngineAcceptance]:
        """The counts that the programs printed, summed over each workload and depth."""
        counted = [run for run in runs if run.depth and not run.is_warmup and run.printed is not None]
        groups = grouped(counted, lambda run: (run.prompt.workload, run.depth))
        return [self._counted(workload, depth, of_group) for (workload, depth), of_group in groups.items()]

    def _counted(self, workload: str, depth: int, runs: Sequence[Run]) -> EngineAcceptance:
        acceptances = [run.printed.acceptance for run in runs if run.printed is not None and run.printed.acceptance]
        lists = [counts.per_position for counts in acceptances if counts.per_position is not None]
        padded = [[*counts, *[0] * (depth - len(counts))] for counts in lists]
        by_position = [sum(column) for column in zip(*padded, strict=True)] if len(lists) == len(acceptances) else []
        return EngineAcceptance(
            session_id=self.session_id,
            target_key=self.target_key,
            draft_key=self.draft_key,
            method=self.method,
            depth_k=depth,
            workload=workload,
            concurrency=1,
            engine="llama.cpp",
            engine_version=self.version,
            source="program",
            num_requests=len(runs),
            num_rounds=sum(counts.num_rounds for counts in acceptances),
            num_drafted=sum(counts.num_drafted for counts in acceptances),
            num_accepted=sum(counts.num_accepted for counts in acceptances),
            accepted_per_position=by_position,
            drafted_per_position=None,
        )


_NUMBER: Final = r"\s*([0-9.]+)"
_ENCODED: Final = re.compile(rf"encoded{_NUMBER} tokens in{_NUMBER} seconds")
_DECODED: Final = re.compile(rf"decoded{_NUMBER} tokens in{_NUMBER} seconds")
_COUNT: Final = re.compile(r"\bn_(predict|drafted|accept)\s+= (\d+)")
_STATISTICS: Final = re.compile(
    r"statistics +([\w-]+): #calls\(b,g,a\) = +\d+ +\d+ +(\d+), .*?#gen tokens = +(\d+), #acc tokens = +(\d+)"
    r"(?:.*?#acc rate/pos = \(([0-9., ]*)\))?"
)
_PROMPT_EVAL: Final = re.compile(rf"prompt eval time ={_NUMBER} ms /{_NUMBER} tokens")
_EVAL: Final = re.compile(rf"(?<!prompt )\beval time ={_NUMBER} ms /{_NUMBER} runs")
_SAMPLING: Final = re.compile(rf"\bsampling time ={_NUMBER} ms")
_VERSION: Final = re.compile(r"^version: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class ProgramOutput:
    """The output of one run. Times in ns; acceptance is None for plain decoding."""

    prompt_tokens: int
    tokens: int
    prefill_ns: int
    decode_ns: int
    acceptance: Acceptance | None


def read_speculative(text: str) -> ProgramOutput | None:
    """Parse llama-speculative-simple's log; None where its counts are missing."""
    encoded, decoded = _ENCODED.search(text), _DECODED.search(text)
    counts = {name: int(value) for name, value in _COUNT.findall(text)}
    if encoded is None or decoded is None or counts.keys() < {"predict", "drafted", "accept"}:
        return None
    # each round emits what it accepted and one token more
    acceptance = Acceptance(counts["predict"] - counts["accept"], counts["drafted"], counts["accept"])
    statistics = _STATISTICS.search(text)
    if statistics is not None:
        rounds, drafted, accepted = int(statistics[2]), int(statistics[3]), int(statistics[4])
        acceptance = Acceptance(rounds, drafted, accepted, _by_position(statistics[5] or "", rounds, accepted))
    return ProgramOutput(int(encoded[1]), int(decoded[1]), _ns(encoded[2], 1e9), _ns(decoded[2], 1e9), acceptance)


def read_plain(text: str) -> ProgramOutput | None:
    """Parse llama.cpp's timings after plain decoding; None where they are missing."""
    prompt, steps, sampling = _PROMPT_EVAL.search(text), _EVAL.search(text), _SAMPLING.search(text)
    if prompt is None or steps is None:
        return None
    decode_ns = _ns(steps[1], 1e6) + (_ns(sampling[1], 1e6) if sampling is not None else 0)
    return ProgramOutput(int(prompt[2]), int(steps[2]) + 1, _ns(prompt[1], 1e6), decode_ns, None)


def read_version(text: str) -> str:
    """The version that a program states, "" where it states none."""
    version = _VERSION.search(text)
    return version[1].strip() if version is not None else ""


def _by_position(rates: str, rounds: int, accepted: int) -> list[int] | None:
    """Counts from rates of three decimals; None where rounding is ambiguous (their sum must be `accepted`)."""
    counts = [round(float(rate) * rounds) for rate in rates.split(",") if rate.strip()]
    return counts if sum(counts) == accepted else None


def _ns(number: str, unit: float) -> int:
    return round(float(number) * unit)
