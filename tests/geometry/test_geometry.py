"""geometry.py against element-by-element oracles: every function is checked on the set of elements that it describes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ray.geometry import Block, Extent, FlatSpace, Route, boxes, intervals, merge_adjacent, routes, row_numel

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    total = math.prod(shape)
    start = draw(st.integers(0, total))
    return shape, start, draw(st.integers(start, total))


@settings(max_examples=300)
@given(ranges())
def test_boxes_tile_the_range_in_memory_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, end = case
    elements = np.arange(math.prod(shape)).reshape(shape)
    taken: list[int] = []
    found = boxes(shape, start, end)
    for offsets, sizes in found:
        assert all(size > 0 for size in sizes), "an empty box"
        inside = elements[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].ravel()
        assert inside.size == math.prod(sizes), "the box leaves the tensor"
        taken += inside.tolist()
    assert taken == list(range(start, end))
    assert len(found) <= max(2 * len(shape) - 1, 1)


@settings(max_examples=150)
@given(shapes, st.data())
def test_range_of_one_sub_box_gives_exactly_one_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    if not math.prod(shape):
        return
    # Sub-boxes that are contiguous in memory have fixed indices, then one free interval, then whole dimensions.
    k = data.draw(st.integers(0, len(shape)))
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in range(k):
        offsets[dim], sizes[dim] = data.draw(st.integers(0, shape[dim] - 1)), 1
    if k < len(shape):
        offsets[k] = data.draw(st.integers(0, shape[k] - 1))
        sizes[k] = data.draw(st.integers(1, shape[k] - offsets[k]))
    start = sum(o * math.prod(shape[d + 1 :]) for d, o in enumerate(offsets))
    assert boxes(shape, start, start + math.prod(sizes)) == ((tuple(offsets), tuple(sizes)),)


def test_boxes_refuse_a_range_outside_the_tensor() -> None:
    for start, end in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(ValueError, match="of shape"):
            boxes((2, 3), start, end)


@settings(max_examples=300)
@given(shapes, st.data())
def test_intervals_of_boxes_are_minimal_exact_and_ordered(shape: tuple[int, ...], data: st.DataObject) -> None:
    offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
    sizes = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
    total = math.prod(sizes)
    start = data.draw(st.integers(0, total))
    end = data.draw(st.integers(start, total))
    held = [(tuple(o + b for o, b in zip(offsets, base, strict=True)), part) for base, part in boxes(sizes, start, end)]  # of a section
    elements = np.arange(math.prod(shape)).reshape(shape)
    expected = elements[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].ravel().tolist()[start:end]
    found = intervals(shape, held)
    assert [e for a, b in found for e in range(a, b)] == expected
    assert all(b > a for a, b in found) and all(a[1] < b[0] for a, b in itertools.pairwise(found))


@st.composite
def holders(draw: st.DrawFn, space: int, replicas: bool) -> list[list[Extent]]:
    """Holders that together have every element of the space, at scattered offsets. With ``replicas`` some elements have two holders."""
    count = draw(st.integers(1, 5))
    cuts = sorted(draw(st.lists(st.integers(0, space), max_size=8)))
    held: list[list[Extent]] = [[] for _ in range(count)]
    ends = [0] * count
    for start, end in itertools.pairwise([0, *cuts, space]):
        owners = {draw(st.integers(0, count - 1))}
        if replicas and draw(st.booleans()):
            owners.add(draw(st.integers(0, count - 1)))
        for owner in owners:
            offset = ends[owner] + draw(st.integers(0, 2))
            held[owner].append(Extent(start, end, offset))
            ends[owner] = offset + end - start
    return [draw(st.permutations(extents)) for extents in held]


@settings(max_examples=150)
@given(st.data(), st.integers(0, 40), st.booleans())
def test_routes_fill_every_wanted_element_exactly_once(data: st.DataObject, space: int, replicas: bool) -> None:
    sources, wanted = data.draw(holders(space, replicas)), data.draw(holders(space, False))
    memory = [dict[int, int]() for _ in sources]
    for holder, extents in enumerate(sources):
        for e in extents:
            memory[holder].update({e.offset + i: e.start + i for i in range(e.end - e.start)})
    filled: dict[tuple[int, int], int] = {}
    for route in routes(sources, wanted):
        assert route.length > 0
        for i in range(route.length):
            place = (route.dst, route.dst_offset + i)
            assert place not in filled, "an element arrives twice"
            filled[place] = memory[route.src][route.src_offset + i]
            assert filled[place] == route.start + i
    expected = {(dst, e.offset + i): e.start + i for dst, extents in enumerate(wanted) for e in extents for i in range(e.end - e.start)}
    assert filled == expected


@settings(max_examples=100)
@given(st.data(), st.integers(0, 40))
def test_routes_use_own_elements_first_then_the_lowest_holder(data: st.DataObject, space: int) -> None:
    sources, wanted = data.draw(holders(space, True)), data.draw(holders(space, False))
    who = [{e.start + i for e in extents for i in range(e.end - e.start)} for extents in sources]
    for route in routes(sources, wanted):
        for element in range(route.start, route.start + route.length):
            have = [holder for holder, elements in enumerate(who) if element in elements]
            assert route.src == (route.dst if route.dst in have else min(have))


def test_routes_name_the_first_element_without_a_holder() -> None:
    with pytest.raises(ValueError, match=r"no source holds elements from 4 on \(holder 1 wants them up to 8\)"):
        routes([[Extent(0, 4, 0)]], [[Extent(0, 2, 0)], [Extent(2, 8, 0)]])


def test_routes_between_equal_layouts_stay_local() -> None:
    layout = [[Extent(0, 3, 0)], [], [Extent(3, 10, 5)]]
    assert routes(layout, layout) == [Route(0, 0, 0, 3, 0, 0), Route(2, 2, 3, 7, 5, 5)]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(0, 20)), max_size=8))
def test_merge_adjacent_keeps_the_mapping_and_merges_all(raw: list[tuple[int, int, int]]) -> None:
    extents = [Extent(start, start + length, offset) for start, length, offset in raw]
    merged = merge_adjacent(extents)

    def pairs(items: list[Extent]) -> list[tuple[int, int]]:
        return sorted((e.start + i, e.offset + i) for e in items for i in range(e.end - e.start))

    assert pairs(merged) == pairs(extents)
    assert all(e.end > e.start for e in merged) and [e.start for e in merged] == sorted(e.start for e in merged)
    for a, b in itertools.pairwise(merged):
        assert not (a.end == b.start and a.offset + a.end - a.start == b.offset)


@settings(max_examples=200)
@given(shapes, st.sampled_from(["element", "rows", "tile", "tensor"]), st.integers(1, 7))
def test_row_and_tile_blocks_are_whole_rows_of_one_matrix(shape: tuple[int, ...], kind: str, rows: int) -> None:
    block = {"element": Block.element(), "rows": Block.rows(rows), "tile": Block.tile(rows, 3), "tensor": Block.tensor()}[kind]
    total, numel = math.prod(shape), block.numel(shape)
    assert 1 <= numel <= max(total, 1)
    if kind == "element" or not total:
        assert numel == 1
    elif kind == "tensor":
        assert numel == total
    else:
        assert numel % row_numel(shape) == 0 and numel <= rows * row_numel(shape)


@settings(max_examples=300)
@given(shapes, st.sampled_from(["rows", "tile"]), st.integers(1, 7))
def test_blocks_begin_anew_in_each_matrix_of_a_stack(shape: tuple[int, ...], kind: str, rows: int) -> None:
    block, total = Block.rows(rows) if kind == "rows" else Block.tile(rows, 3), math.prod(shape)
    height = shape[-2] if len(shape) >= 3 else math.prod(shape[:-1]) if len(shape) == 2 else total
    numbers = [(i // row_numel(shape) // max(height, 1), i // row_numel(shape) % max(height, 1) // rows) for i in range(total)]
    cuts = {i for i in range(1, total) if numbers[i] != numbers[i - 1]}
    assert cuts == {i for i in range(1, total) if i % block.period(shape) % block.numel(shape) == 0}


@pytest.mark.parametrize(
    ("make", "says"), [(lambda: Block.rows(0), "a block of 0 rows"), (lambda: Block.tile(2, 0), "a tile of 0 columns")]
)
def test_an_empty_block_is_refused(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]


def test_extent_refuses_reversed_and_negative_ranges() -> None:
    for bad in ((3, 2, 0), (-1, 2, 0), (0, 1, -1)):
        with pytest.raises(ValueError, match="not an extent"):
            Extent(*bad)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 5), max_size=6))
def test_a_flat_space_lays_tensors_end_to_end(sizes: list[int]) -> None:
    space = FlatSpace([(f"t{i}", n) for i, n in enumerate(sizes)])
    assert space.numel == sum(sizes)
    for i, n in enumerate(sizes):
        assert space.base(f"t{i}") == sum(sizes[:i]) and space.numel_of(f"t{i}") == n


def test_a_flat_space_refuses_a_name_twice() -> None:
    with pytest.raises(ValueError, match="'w' is listed twice"):
        FlatSpace([("w", 1), ("w", 2)])
