"""The code that a step reaches, symbol by symbol, as digests of syntax trees.

Starting at the step's function, every name it uses is followed to the top-level definition it stands for: in the same
module, or through imports (at the top or inside functions) in other modules of the same packages. A class counts whole,
a module used in a way that cannot be resolved counts whole. A template or C file that the code names counts as code.

Of a registry only the entries that the settings name are followed. A registry is a module-level dict literal of
"module:Class" texts, or of calls, `Method(draft_class="module:Class", trained=False)`, whose arguments are all given by
keyword and among which each has such a text. Of a call only the arguments count that the reached code mentions as
attributes (`.draft_class`), so that a fact for the card makes no training new.

Docstrings, comments, formatting, positions, imports and the annotations of functions do not enter a digest, so that
editing them makes nothing new. Files are parsed, never imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from components.source_code import syntax_tree

BODY = "(module body)"  # statements that run on import and define no name
_ENTRY = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_FILE = re.compile(r"^[\w-]+(\.[\w-]+)*\.(jinja|html|css|js|json|sql|txt|md|c|h)$")
_SKIPPED_FIELDS = frozenset({"ctx", "type_comment", "kind", "returns", "type_params"})

Import = tuple[str, str | None]  # (module, symbol), symbol None for `import module`


@dataclass
class Symbol:
    """One top-level statement. digests: (name, digest), for a class one for each method and one for the rest.

    chains: names it mentions with their attributes, ("a", "b") for a.b. attributes: all it mentions, of anything.
    imports: made inside it. entries: those of a registry. files: files beside the module that it names.
    """

    digests: tuple[tuple[str, str], ...]
    chains: frozenset[tuple[str, ...]]
    attributes: frozenset[str]
    imports: dict[str, Import]
    entries: tuple[Entry, ...] = ()
    files: tuple[Path, ...] = ()


@dataclass
class Entry:
    """One argument of a registry's entry: the code of its value, and the "module:Class" texts in it.

    name: the entry's. argument: "" where the entry is no call but a text.
    """

    name: str
    argument: str
    code: Symbol
    addresses: tuple[str, ...]


@dataclass
class Module:
    """One parsed file. label: its path from the root of its package's folder."""

    name: str
    label: str
    symbols: dict[str, list[Symbol]] = field(default_factory=dict)
    imports: dict[str, Import] = field(default_factory=dict)


@functools.lru_cache(maxsize=4096)
def load_module(name: str, packages: tuple[str, ...]) -> Module | None:
    """A module of one of the packages, parsed from its file without importing it; None for anything else."""
    root, _, rest = name.partition(".")
    if root not in packages:
        return None
    for folder in importlib.import_module(root).__path__:
        place = Path(folder, *rest.split(".")) if rest else Path(folder)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                label = f"{root}/{file.relative_to(folder).as_posix()}"
                return _parse(name, label, file, is_package=file.name == "__init__.py")
    return None


def digest_of(content: str | bytes) -> str:
    """A short sha256."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:16]


def _parse(name: str, label: str, file: Path, *, is_package: bool) -> Module:
    tree = syntax_tree(file.read_bytes(), str(file))
    package = name if is_package else name.rpartition(".")[0]
    module = Module(name, label)
    body: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            module.imports.update(_imported(statement, package))
        elif _is_docstring(statement) or _is_type_checking(statement):
            continue
        else:
            names = list(dict.fromkeys(_defined(statement)))
            for defined in names:
                module.symbols.setdefault(defined, []).append(_symbol(statement, defined, package, file.parent))
            if not names:
                body.append(statement)
            if isinstance(statement, ast.If | ast.Try | ast.With):
                for inner in ast.walk(statement):
                    if isinstance(inner, ast.Import | ast.ImportFrom):
                        module.imports.update(_imported(inner, package))
    if body:
        block = ast.If(test=ast.Constant(True), body=body, orelse=[])
        module.symbols[BODY] = [_symbol(block, BODY, package, file.parent)]
    return module


def _symbol(statement: ast.stmt, name: str, package: str, folder: Path) -> Symbol:
    reader = _Reader(package)
    if entries := _registry(statement, reader):
        return Symbol((), frozenset(reader.chains), frozenset(), {}, entries)
    if isinstance(statement, ast.ClassDef):
        digests = tuple(reader.class_digests(statement))
    else:
        digests = ((name, reader.digest(statement)),)
    files = [folder / text for text in sorted(reader.texts) if _FILE.match(text)]
    chains = frozenset(chain for chain in reader.chains if chain[0] != name or chain[1:])
    there = tuple(file for file in files if file.is_file())
    return Symbol(digests, chains, frozenset(reader.attributes), reader.imports, (), there)


class _Reader:
    """Reads a syntax tree once: its text without what does not matter, and the names, imports and texts in it."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.chains: set[tuple[str, ...]] = set()
        self.attributes: set[str] = set()
        self.imports: dict[str, Import] = {}
        self.texts: set[str] = set()

    def digest(self, *nodes: ast.AST) -> str:
        """Digest of some nodes in order."""
        words: list[str] = []
        for node in nodes:
            self._read(node, words, in_function=False)
        return digest_of("\x1f".join(words))

    def class_digests(self, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
        """One digest for each method (a property and its setter share a name) and one for the rest of the class."""
        methods: dict[str, list[ast.stmt]] = {}
        rest: list[ast.stmt] = []
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                methods.setdefault(inner.name, []).append(inner)
            elif not _is_docstring(inner):
                rest.append(inner)
        frame = ast.ClassDef(node.name, node.bases, node.keywords, rest or [ast.Pass()], node.decorator_list)
        yield node.name, self.digest(frame)
        for name, definitions in methods.items():
            yield f"{node.name}.{name}", self.digest(*definitions)

    def _read(self, node: ast.AST, words: list[str], *, in_function: bool) -> None:
        if isinstance(node, ast.Name | ast.Attribute):
            self._note_chain(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self.imports.update(_imported(node, self.package))
            return  # what it names is followed; where that stands changes nothing
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.texts.add(node.value)
        words.append(type(node).__name__)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            in_function = True
        elif isinstance(node, ast.ClassDef):
            in_function = False
        hides_annotation = isinstance(node, ast.arg) or (in_function and isinstance(node, ast.AnnAssign))
        for name in node._fields:
            if name in _SKIPPED_FIELDS or (name == "annotation" and hides_annotation):
                continue
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                self._read_inner(node, value, words, in_function)
            elif isinstance(value, list):
                words.append("[")
                for item in value:
                    if isinstance(item, ast.AST):
                        if not (isinstance(item, ast.stmt) and _is_docstring(item)):
                            self._read(item, words, in_function=in_function)
                    else:
                        words.append(repr(item))
                words.append("]")
            else:
                words.append(repr(value))

    def _read_inner(self, node: ast.AST, value: ast.AST, words: list[str], in_function: bool) -> None:
        if isinstance(node, ast.Attribute) and isinstance(value, ast.Name | ast.Attribute):
            self._read_chain(value, words)  # its names are noted already, as part of the longer chain
        else:
            self._read(value, words, in_function=in_function)

    def _read_chain(self, node: ast.expr, words: list[str]) -> None:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            words.extend(("Attribute", node.attr))
            self._read_chain(node.value, words)
        elif isinstance(node, ast.Name):
            words.extend(("Name", node.id))
        else:
            self._read(node, words, in_function=True)

    def _note_chain(self, node: ast.expr) -> None:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        self.attributes.update(parts)
        if isinstance(node, ast.Name):
            self.chains.add((node.id, *reversed(parts)))


def _registry(statement: ast.stmt, frame: _Reader) -> tuple[Entry, ...]:
    """The entries when the statement assigns a registry; `frame` reads what all of them share, the called class."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(statement.value, ast.Dict):
        return ()
    entries: list[Entry] = []
    for key, value in zip(statement.value.keys, statement.value.values, strict=True):
        arguments = _arguments(value)
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)) or not arguments:
            return ()
        read = [_entry(key.value, name, argument, frame.package) for name, argument in arguments.items()]
        if not any(entry.addresses for entry in read):
            return ()
        if isinstance(value, ast.Call):
            frame.digest(value.func)
        entries += read
    return tuple(entries)


def _arguments(value: ast.expr) -> dict[str, ast.expr]:
    """{"": text} of a text, the arguments of a call by keyword, {} for anything else."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return {"": value}
    if not isinstance(value, ast.Call) or value.args or any(word.arg is None for word in value.keywords):
        return {}
    return {word.arg: word.value for word in value.keywords if word.arg is not None}


def _entry(name: str, argument: str, value: ast.expr, package: str) -> Entry:
    """An argument whose "module:Class" texts enter its digest without the module, so that a class may move."""
    reader, addresses = _Reader(package), []
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and _ENTRY.match(value.value):
        addresses.append(value.value)
        digest = digest_of(value.value.partition(":")[2])
    else:
        digest = reader.digest(value)
    label = f"[{name}].{argument}" if argument else f"[{name}]"
    code = Symbol(((label, digest),), frozenset(reader.chains), frozenset(reader.attributes), reader.imports)
    return Entry(name, argument, code, tuple(addresses))


def _imported(statement: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, Import]]:
    for alias in statement.names:
        if isinstance(statement, ast.ImportFrom):
            yield alias.asname or alias.name, (_absolute(statement, package), alias.name)
        elif alias.asname:
            yield alias.asname, (alias.name, None)
        else:
            root = alias.name.split(".")[0]
            yield root, (root, None)


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - (statement.level - 1)]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def _defined(statement: ast.AST) -> Iterator[str]:
    """Names that a top-level statement defines, those inside `if`, `try`, `with` and `for` included."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
    elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.ExceptHandler):
        for inner in ast.iter_child_nodes(statement):
            if isinstance(inner, ast.stmt | ast.ExceptHandler):
                yield from _defined(inner)


def _is_docstring(statement: ast.stmt) -> bool:
    """A text that stands alone does nothing, wherever it is."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def _is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


Target = tuple[str, str]  # (module, symbol)


def reached_symbols(module: str, function: str, words: frozenset[str], packages: tuple[str, ...]) -> dict[str, str]:
    """{"components/drafts/methods/eagle3.py: Eagle3.losses": digest} of everything the function reaches, sorted.

    words: texts in the settings of the step and its ancestors, which choose the entries of registries.
    """
    digests: dict[str, str] = {}
    seen: set[Target] = set()
    waiting: list[Target] = [(module, function)]
    attributes, entries = {""}, list[_ReachedEntry]()
    while waiting:
        target = waiting.pop()
        if target not in seen:
            seen.add(target)
            reach = _look_at(*target, packages)
            digests.update(reach.digests)
            waiting.extend(reach.leads_to)
            attributes |= reach.attributes
            entries += [entry for entry in reach.entries if entry.name in words]
        while not waiting and (due := [entry for entry in entries if entry.argument in attributes]):
            for entry in due:
                entries.remove(entry)
                digests.update(entry.digests)
                waiting.extend(entry.leads_to)
                attributes |= entry.attributes
    return dict(sorted(digests.items()))


class _Reach:
    """What one symbol adds: digests, the symbols it leads to, the attributes it mentions, the entries of a registry."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.leads_to: list[Target] = []
        self.attributes: frozenset[str] = frozenset()
        self.entries: list[_ReachedEntry] = []


@dataclass(frozen=True)
class _ReachedEntry:
    """What one argument of a registry's entry adds."""

    name: str
    argument: str
    digests: dict[str, str]
    leads_to: list[Target]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=16384)
def _look_at(module_name: str, symbol: str, packages: tuple[str, ...]) -> _Reach:
    reach = _Reach()
    module = load_module(module_name, packages)
    if module is None:
        return reach
    if symbol in module.symbols:
        if symbol != BODY:
            reach.leads_to.append((module_name, BODY))
        for piece in module.symbols[symbol]:
            for entry in piece.entries:
                addresses = [address.partition(":") for address in entry.addresses]
                leads_to = [(head, tail) for head, _, tail in addresses]
                leads_to += dict.fromkeys(_mentioned(module, entry.code, packages))
                labels = {f"{module.label}: {symbol}{name}": digest for name, digest in entry.code.digests}
                reach.entries.append(_ReachedEntry(entry.name, entry.argument, labels, leads_to, entry.code.attributes))
            reach.attributes |= piece.attributes
            reach.digests.update({f"{module.label}: {name}": digest for name, digest in piece.digests})
            for file in piece.files:
                label = f"{module.label.rpartition('/')[0]}/{file.name}"
                reach.digests[label] = digest_of(file.read_bytes())
            reach.leads_to += dict.fromkeys(_mentioned(module, piece, packages))
    elif symbol in module.imports:
        reach.leads_to += _behind(*module.imports[symbol], (), packages)
    elif load_module(f"{module_name}.{symbol}", packages) is not None:
        reach.leads_to += _whole(f"{module_name}.{symbol}", packages)
    return reach


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
    module = load_module(source, packages)
    if module is None:
        return
    parts = (symbol, *rest) if symbol is not None else rest
    for part in parts:
        if part in module.symbols or part in module.imports:
            yield module.name, part
            return
        inner = load_module(f"{module.name}.{part}", packages)
        if inner is None:
            break
        module = inner
    yield from _whole(module.name, packages)


def _whole(name: str, packages: tuple[str, ...]) -> Iterator[Target]:
    module = load_module(name, packages)
    if module is not None:
        yield from ((name, symbol) for symbol in module.symbols)
