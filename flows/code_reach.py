"""The code that a step reaches, symbol by symbol, as digests of syntax trees.

Starting at the step's function, every name it uses is followed to the top-level definition it stands for: in the same
module, or through imports (at the top or inside functions) in other modules of the same packages. A class counts whole,
a module used in a way that cannot be resolved counts whole. Of a registry (a module-level dict literal of
"module:Class" texts) only the entries that the settings name are followed. A template named in the code counts as code.
How a file is read, and what does not enter a digest, is in code_symbols.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from flows.code_symbols import BODY, Module, Symbol, digest_of, load_module

Target = tuple[str, str]  # (module, symbol)


def reached_symbols(module: str, function: str, words: frozenset[str], packages: tuple[str, ...]) -> dict[str, str]:
    """{"components/drafts/eagle3.py: Eagle3.losses": digest} of everything the function reaches, sorted.

    words: texts in the settings of the step and its ancestors, which choose the entries of registries.
    """
    digests: dict[str, str] = {}
    seen: set[Target] = set()
    waiting: list[Target] = [(module, function)]
    while waiting:
        target = waiting.pop()
        if target in seen:
            continue
        seen.add(target)
        found = _look_at(*target, packages)
        digests.update(found.digests)
        waiting.extend(found.leads_to)
        for label, name, entry in found.entries:
            if name in words:
                entry_module, _, entry_symbol = entry.partition(":")
                digests[f"{label}[{name}]"] = digest_of(entry_symbol)
                waiting.append((entry_module, entry_symbol))
    return dict(sorted(digests.items()))


class _Found:
    """What one symbol adds: digests, the symbols it leads to, and registry entries (label, name, "module:Class")."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.leads_to: list[Target] = []
        self.entries: list[tuple[str, str, str]] = []


@functools.lru_cache(maxsize=16384)
def _look_at(module_name: str, symbol: str, packages: tuple[str, ...]) -> _Found:
    found = _Found()
    module = load_module(module_name, packages)
    if module is None:
        return found
    if symbol in module.symbols:
        if symbol != BODY:
            found.leads_to.append((module_name, BODY))
        for piece in module.symbols[symbol]:
            found.entries += [(f"{module.label}: {symbol}", name, entry) for name, entry in piece.registry.items()]
            found.digests.update({f"{module.label}: {name}": digest for name, digest in piece.digests})
            for file in piece.files:
                label = f"{module.label.rpartition('/')[0]}/{file.name}"
                found.digests[label] = digest_of(file.read_bytes())
            found.leads_to += dict.fromkeys(_mentioned(module, piece, packages))
    elif symbol in module.imports:
        found.leads_to += _behind(*module.imports[symbol], (), packages)
    elif load_module(f"{module_name}.{symbol}", packages) is not None:
        found.leads_to += _whole(f"{module_name}.{symbol}", packages)
    return found


def _mentioned(module: Module, piece: Symbol, packages: tuple[str, ...]) -> Iterator[Target]:
    """What the names in a piece of code stand for, as far as it lies in the packages."""
    for head, *rest in piece.chains:
        if head in piece.imports or head in module.imports:
            source, symbol = piece.imports.get(head) or module.imports[head]
            yield from _behind(source, symbol, tuple(rest), packages)
        elif head in module.symbols:
            yield module.name, head


def _behind(source: str, symbol: str | None, rest: tuple[str, ...], packages: tuple[str, ...]) -> Iterator[Target]:
    """What `from source import symbol` (or `import source`), followed by .rest, stands for."""
    found = load_module(source, packages)
    if found is None:
        return
    parts = (symbol, *rest) if symbol is not None else rest
    for part in parts:
        if part in found.symbols or part in found.imports:
            yield found.name, part
            return
        inner = load_module(f"{found.name}.{part}", packages)
        if inner is None:
            break
        found = inner
    yield from _whole(found.name, packages)


def _whole(name: str, packages: tuple[str, ...]) -> Iterator[Target]:
    module = load_module(name, packages)
    if module is not None:
        yield from ((name, symbol) for symbol in module.symbols)
