"""Which attention reads a cache: `quire::attend`, SDPA, or products around a softmax, and by which mask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from compiler_service.proof import rules
from compiler_service.proof.evaluate import bind


@dataclass(frozen=True, slots=True)
class Mask:
    """A tensor that may hide cells: an additive one, or a boolean one that is true for the visible cells, or for the hidden."""

    node: fx.Node
    hides: bool = False


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


def attentions_over(contents: Iterable[fx.Node]) -> list[Attention]:
    """Every attention that reads a cache after its write (`contents` hold it), straight or through views, repeats and scaling."""
    found = []
    for consumer, operand in _consumers(contents):
        name = str(consumer.target)
        arguments = bind(consumer)
        if name == rules.ATTEND:
            query = arguments["q"]
            assert isinstance(query, fx.Node)
            found.append(Attention(consumer, arguments["k_cache"] is operand, query))
        elif name in rules.SDPA:
            query, mask = arguments["query"], arguments.get("attn_mask", arguments.get("attn_bias"))
            assert isinstance(query, fx.Node)
            masks = (Mask(mask),) if isinstance(mask, fx.Node) else ()
            found.append(Attention(consumer, arguments["key"] is operand, query, masks, bool(arguments.get("is_causal"))))
        elif name in rules.MATMUL:
            found += _around_softmax(consumer, operand)
        elif rules.may_attend(name):
            found.append(Attention(consumer, True, consumer, is_known=False))
    return found


def _consumers(contents: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(reader, the operand it reads) for whoever reads `contents` once layout and scaling are looked through."""
    pending, seen = list(contents), set(contents)
    while pending:
        value = pending.pop()
        for user in value.users:
            if user.op != "call_function":
                continue
            if str(user.target) in rules.SCORES and user not in seen:
                seen.add(user)
                pending.append(user)
            elif str(user.target) not in rules.SCORES:
                yield user, value


def _around_softmax(product: fx.Node, operand: fx.Node) -> Iterator[Attention]:
    softmax = _softmax_after(product)
    if softmax is not None:
        yield Attention(softmax, True, product, tuple(_masks_between(product, softmax)))
        return
    weights = [other for other in product.all_input_nodes if other is not operand]
    softmax = _softmax_before(weights)
    if softmax is not None:
        yield Attention(softmax, False, product)


def _softmax_after(product: fx.Node) -> fx.Node | None:
    pending, seen = [product], {product}
    while pending:
        for user in pending.pop().users:
            if str(user.target) in rules.SOFTMAX:
                return user
            if str(user.target) in rules.SCORES and user not in seen:
                seen.add(user)
                pending.append(user)
    return None


def _softmax_before(nodes: list[fx.Node]) -> fx.Node | None:
    pending, seen = list(nodes), set(nodes)
    while pending:
        node = pending.pop()
        if str(node.target) in rules.SOFTMAX:
            return node
        if str(node.target) in rules.SCORES:
            fresh = [source for source in node.all_input_nodes if source not in seen]
            seen.update(fresh)
            pending += fresh
    return None


def _masks_between(product: fx.Node, softmax: fx.Node) -> Iterator[Mask]:
    """What is added to the scores, or chooses between them and another value, on the way to the softmax."""
    scores, pending = {product}, [product]
    while pending:
        for user in pending.pop().users:
            if user is softmax or user in scores or str(user.target) not in rules.SCORES:
                continue
            scores.add(user)
            pending.append(user)
            arguments = bind(user)
            if str(user.target) == rules.SUM:
                yield from (Mask(other) for other in user.all_input_nodes if other not in scores)
            elif str(user.target) in rules.CHOICES and isinstance(arguments["condition"], fx.Node):
                yield Mask(arguments["condition"], hides=arguments["self"] not in scores)
            elif str(user.target) in rules.FILL_MASKED and isinstance(arguments["mask"], fx.Node):
                yield Mask(arguments["mask"], hides=True)
