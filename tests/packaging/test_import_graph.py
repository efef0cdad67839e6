"""The graph of all imports of product code has no cycle, with lazy imports and those for type checkers included.

A class name has one meaning.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.packaging.sources import PRODUCT, module_of, nodes

MODULES = {module_of(path): path for path in PRODUCT}


def imports(module: str, tree: Iterable[ast.AST], known: Mapping[str, object]) -> Iterator[str]:
    """Modules among the ``known`` ones that ``module`` imports, except the packages that contain it."""
    package = module if MODULES.get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if f"{base}.{alias.name}" in known:
                    yield f"{base}.{alias.name}"
                elif base in known:
                    yield str(base)


def cycles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components of more than one module, by Kosaraju's two passes."""
    order: list[str] = []
    seen: set[str] = set()
    for start in graph:
        stack = [(start, iter(graph[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            module, following = stack[-1]
            deeper = next((one for one in following if one not in seen), None)
            if deeper is None:
                order.append(module)
                stack.pop()
            else:
                seen.add(deeper)
                stack.append((deeper, iter(graph[deeper])))
    backwards = defaultdict(set)
    for module, targets in graph.items():
        for target in targets:
            backwards[target].add(module)
    found, taken = set(), set[str]()
    for root in reversed(order):
        pending, group = [root], set()
        while pending:
            module = pending.pop()
            if module not in taken:
                taken.add(module)
                group.add(module)
                pending += backwards[module]
        if len(group) > 1:
            found.add(frozenset(group))
    return found


def test_imports_make_no_cycle() -> None:
    graph = {module: set(imports(module, nodes(path), MODULES)) - {module} for module, path in MODULES.items()}
    short = {frozenset(module.removeprefix("vescale_ray.") for module in group) for group in cycles(graph)}
    assert not short, [sorted(one) for one in short]


def test_the_search_finds_cycles_and_lazy_imports() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {frozenset("abc")}
    lazy = ast.parse("if TYPE_CHECKING:\n    from p import a\ndef f():\n    from p.b import x\n    import p.c\n")
    assert set(imports("p.d", ast.walk(lazy), dict.fromkeys(("p", "p.a", "p.b", "p.c")))) == {"p.a", "p.b", "p.c"}


def test_no_two_classes_share_a_name() -> None:
    homes = defaultdict(list)
    for module, path in MODULES.items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module)
    assert len(homes) > 400
    assert not {name: where for name, where in homes.items() if len(where) > 1}
