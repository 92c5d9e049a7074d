"""Which attention reads a cache: `quire::attend`, SDPA, or products around a softmax, and by which mask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from compiler_service.proof import places, rules
from compiler_service.proof.evaluate import bind
from compiler_service.proof.places import Place


@dataclass(frozen=True, slots=True)
class Mask:
    """A tensor that may hide cells: an additive one, or a boolean one that is true for the visible cells, or for the hidden.

    `filling` is what the scores of hidden cells become, where the attention says so itself.
    """

    node: fx.Node
    hides: bool = False
    filling: object = None


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention that reads a cache as its keys or its values.

    `node` identifies it: the attention operator, or the softmax. Axis -2 of `queries` counts the queries. `masks` are those
    of the keys; an attention found from its values has none. `is_causal` is SDPA's flag. An operator that may attend by rules
    of its own is not `is_known`.
    """

    node: fx.Node
    is_keys: bool
    queries: fx.Node
    masks: tuple[Mask, ...] = ()
    is_causal: bool = False
    is_known: bool = True


def attentions_over(contents: Mapping[fx.Node, Place]) -> list[Attention]:
    """Every attention that reads a cache after its write (`contents` hold it), straight or through views, repeats and scaling.

    One that reads its cells in another order than the cache has them is not known.
    """
    found = []
    for consumer, operand, place in _consumers(contents):
        name = str(consumer.target)
        arguments = bind(consumer) if isinstance(consumer.target, torch._ops.OpOverload) else {}
        if name == rules.ATTEND and places.holds_cells(place, 2):
            query = arguments["q"]
            assert isinstance(query, fx.Node)
            found.append(Attention(consumer, arguments["k_cache"] is operand, query))
        elif name in rules.SDPA and places.holds_cells(place, -2):
            query, mask = arguments["query"], arguments.get("attn_mask", arguments.get("attn_bias"))
            assert isinstance(query, fx.Node)
            masks = (Mask(mask),) if isinstance(mask, fx.Node) else ()
            found.append(Attention(consumer, arguments["key"] is operand, query, masks, bool(arguments.get("is_causal"))))
        elif name in rules.MATMUL and (around := _around_softmax(consumer, operand, place)):
            found += around
        elif name in rules.MATMUL or rules.may_attend(name) or _weighs(consumer, products=_passes(consumer, operand)):
            found.append(Attention(consumer, True, consumer, is_known=False))
    return found


def _weighs(consumer: fx.Node, *, products: bool) -> bool:
    """Whether a reader that is no attention makes weights all the same: it is an exponential, or one follows; with `products`,
    or what it makes gets into a product."""
    pending, seen = [consumer], {consumer}
    while pending:
        node = pending.pop()
        name = str(node.target)
        if name in rules.WEIGHTS or (products and node.op == "call_function" and (name in rules.MATMUL or rules.may_attend(name))):
            return True
        fresh = [user for user in node.users if user not in seen]
        seen.update(fresh)
        pending += fresh
    return False


def _consumers(contents: Mapping[fx.Node, Place]) -> Iterator[tuple[fx.Node, fx.Node, Place]]:
    """(reader, the operand it reads, where that has rows and cells) for whoever reads `contents` once layout, scaling and
    projections are looked through. One of these is a reader itself where it leaves rows and cells in no order."""
    pending, found = list(contents), dict(contents)
    while pending:
        value = pending.pop()
        for user in value.users:
            if user.op != "call_function" or str(user.target) in rules.METADATA:
                continue
            place = places.through(user, value, found[value]) if _passes(user, value) else None
            if place is None or found.get(user, place) != place:
                yield user, value, found[value]
            elif user not in found:
                found[user] = place
                pending.append(user)


def _passes(user: fx.Node, value: fx.Node) -> bool:
    return str(user.target) in rules.SCORES | rules.PARTS or _projects(user, value)


def _projects(user: fx.Node, value: fx.Node) -> bool:
    """Whether `user` makes each cell's keys or values of what the cache holds of it, by a weight: MLA's latents."""
    names = rules.PROJECTIONS.get(str(user.target))
    if names is None:
        return False
    rows, weight = (bind(user)[name] for name in names)
    while isinstance(weight, fx.Node) and str(weight.target) in rules.AXIS_MOVES:
        weight = bind(weight)["self"]
    return rows is value and isinstance(weight, fx.Node) and weight.op == "placeholder"


def _around_softmax(product: fx.Node, operand: fx.Node, place: Place) -> list[Attention]:
    """An attention for each softmax over the product, or for each that weighs it: one without a mask sees everything. None at all
    where the cells are not in their order all the way."""
    if over := _softmaxes(product.users, lambda node: node.users):
        first = places.of_scores(product, operand, place)
        scores = {} if first is None else _in_order(product, first)
        straight = [bind(softmax)["self"] for softmax in over]
        if not all(isinstance(last, fx.Node) and last in scores and places.lies_straight(scores[last]) for last in straight):
            return []
        return [Attention(softmax, True, product, tuple(_masks_between(product, softmax, scores))) for softmax in over]
    weights = places.weighs(product, operand, place)
    if weights is None:
        return []
    over = _softmaxes([weights], lambda node: node.all_input_nodes)
    for softmax in over:
        reached = _in_order(softmax, places.of_weights(softmax, places.cells_of(place)))
        if weights not in reached or not places.holds_cells(reached[weights], -1):
            return []
    return [Attention(softmax, False, product) for softmax in over]


def _in_order(first: fx.Node, place: Place) -> dict[fx.Node, Place]:
    """`first` and all scores made of it that have queries and cells in their order still."""
    pending, found = [first], {first: place}
    while pending:
        value = pending.pop()
        for user in value.users:
            if (
                str(user.target) in rules.SCORES
                and user not in found
                and (at := places.through(user, value, found[value])) is not None
            ):
                found[user] = at
                pending.append(user)
    return found


def _softmaxes(nodes: Iterable[fx.Node], beside: Callable[[fx.Node], Iterable[fx.Node]]) -> list[fx.Node]:
    """Every softmax that `beside` leads to from `nodes`, themselves included, through scores alone."""
    pending, found = list(nodes), []
    seen = set(pending)
    while pending:
        node = pending.pop()
        if str(node.target) in rules.SOFTMAX:
            found.append(node)
        elif str(node.target) in rules.SCORES:
            fresh = [other for other in beside(node) if other not in seen]
            seen.update(fresh)
            pending += fresh
    return found


def _masks_between(product: fx.Node, softmax: fx.Node, scores: Mapping[fx.Node, Place]) -> list[Mask]:
    """What hides cells on the way from the product to the softmax."""
    last = bind(softmax)["self"]
    return _masks_of(last, product, scores) if isinstance(last, fx.Node) else []


def _masks_of(node: fx.Node, product: fx.Node, scores: Mapping[fx.Node, Place]) -> list[Mask]:
    """The masks of the scores `node`, in the order they are put on. What might lift a hidden score (a tanh, a bound, a negative
    factor) ends those before it."""
    if node is product:
        return []
    name, arguments = str(node.target), bind(node)
    own = [value for value in node.all_input_nodes if value in scores]
    each = [_masks_of(value, product, scores) for value in own]
    if name in rules.KEEP_HIDDEN:  # of scores put together, each part is hidden by its own masks alone
        return [mask for mask in each[0] if all(mask in others for others in each)]
    inherited = [mask for masks in each for mask in masks]
    if name in rules.LAYOUT:
        return inherited
    if not places.lies_straight(scores[node]):
        return []
    if name in rules.DIFFERENCES:
        return inherited if arguments["self"] in scores and arguments["other"] not in scores else []
    if name in rules.FACTORS:
        factor = arguments["other"]
        return inherited if isinstance(factor, int | float) and factor > 0 else []
    if name in rules.SUMS and arguments.get("alpha", 1) == 1:
        return inherited + [Mask(other) for other in node.all_input_nodes if other not in scores and not is_boolean(other)]
    if name in rules.CHOICES and len(own) == 1 and isinstance(condition := arguments["condition"], fx.Node):
        hides = arguments["self"] is not own[0]
        return [*inherited, Mask(condition, hides, arguments["self" if hides else "other"])]
    if name in rules.FILL_MASKED and len(own) == 1 and isinstance(hidden := arguments["mask"], fx.Node):
        return [*inherited, Mask(hidden, hides=True, filling=arguments["value"])]
    return []


def is_boolean(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.bool
