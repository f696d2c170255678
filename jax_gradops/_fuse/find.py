"""Finds the ops in a jaxpr."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jax_gradops._fuse import check, search
from jax_gradops._fuse.forms import NoForm
from jax_gradops._fuse.patterns import channel_norms, clip, gelu, losses, norms
from jax_gradops._fuse.patterns.candidate import Candidate, Left
from jax_gradops._fuse.polynomial import Leaf
from jax_gradops._fuse.program import Program, Site
from jax_gradops._fuse.report import Report
from jax_gradops._fuse.search import Values
from jax_gradops._ops.gelu import bias_gelu
from jax_gradops._ops.row_norm import layer_norm

PATTERNS: dict[str, tuple[Callable[[Values, Var], Candidate | None], ...]] = {
    "norm": (norms.row_norm, channel_norms.channel_norm),
    "gelu": (gelu.gelu,),
    "loss": (losses.loss,),
}
# The form of an op that adds two arrays first.
_WITH_ADDITION: dict[str, Callable[..., Any]] = {
    "layer_norm": layer_norm.add_layer_norm,
    "rms_norm": layer_norm.add_rms_norm,
}


class Finder:
    """Finds the ops in one jaxpr."""

    def __init__(self, program: Program, report: Report) -> None:
        self.program, self.report = program, report
        self.sites: list[Site] = []
        self.taken: set[int] = set()
        self._values: dict[Var, Values] = {}

    def run(self) -> list[Site]:
        for i, item in enumerate(self.program.items):
            kind = search.kind(item.equation)
            if kind and i not in self.taken:
                self._around(i, kind)
        return self.sites

    def _around(self, anchor: int, kind: str) -> None:
        """Looks for an op around an equation that may be a part of one."""
        why: list[str] = []
        if kind == "norm":
            try:
                site = clip.clip(self.program, anchor)
            except Left as left:
                site = None
                why.append(str(left))
            if site and not site.region & self.taken:
                self._take(site, "")
                return
        shows = self.program.items[anchor].equation.outvars[0]
        for root in search.roots(self.program, anchor):
            if root not in self._values:
                self._values[root] = search.values_from(self.program, root)
            values = self._values[root]
            if shows not in values.forms:
                continue
            for v in reversed(values.forms):
                for pattern in PATTERNS[kind]:
                    try:
                        candidate = pattern(values, v)
                        site = candidate and self._site(values, candidate, anchor)
                    except Left as left:
                        why.append(str(left))
                        continue
                    if candidate and site:
                        self._take(site, candidate.options)
                        return
            if kind == "norm":
                why.append(norms.why_left(values, shows))
        why = [each for each in why if each]
        if why:
            self.report.left(kind, self.program.source(anchor), why[0])

    def _take(self, site: Site, options: str) -> None:
        self.sites.append(site)
        self.taken |= site.region
        source = self.program.source(self.program.producer[site.outputs[0]])
        self.report.found(site, source, options)

    def _site(self, values: Values, candidate: Candidate, anchor: int) -> Site | None:
        """The equations that an op replaces, after all checks."""
        program, output = self.program, candidate.output
        equations = search.slice_between(program, [output], set(candidate.operands))
        if anchor not in equations:
            return None
        outputs, call = (output,), candidate.call
        region = search.unshared(program, equations, outputs)
        if candidate.statistics:
            outputs, call = self._with_statistics(values, candidate, equations)
            region = search.unshared(program, equations, outputs)
        if region & self.taken:
            return None
        for i in sorted(equations - region):
            name = program.items[i].equation.primitive.name
            if i == anchor or name in ("reduce_sum", "reduce_max"):
                raise Left("a value inside is used elsewhere, too")
        check.equal(values, candidate, sorted(equations))
        at = program.producer[output]
        if len(outputs) > 1:
            at = program.operand_position(candidate.operands)
            if any(u < at and u not in region for v in outputs for u in program.users.get(v, ())):
                raise Left("a parameter is computed from the statistics")
        site = Site(candidate.op, call, candidate.operands, outputs, region, at)
        if candidate.op == "gelu":
            return self._with_bias(values, site)
        return self._with_addition(values, site)

    def _with_statistics(
        self, values: Values, candidate: Candidate, equations: set[int]
    ) -> tuple[tuple[Var, ...], Callable[..., Any]]:
        """The output and the statistics that are used elsewhere, and the call that has these."""
        outputs, places = [candidate.output], [0]
        for i in sorted(equations, reverse=True):
            region = search.unshared(self.program, equations, tuple(outputs))
            v = self.program.items[i].equation.outvars[0]
            if i in region or v not in values.forms:
                continue
            p = values.forms[v].polynomial
            for place, statistic in enumerate(candidate.statistics, 1):
                if p.close_to(statistic):
                    outputs.append(v)
                    places.append(place)
                    break

        def call(*arrays: Any) -> Any:
            found = candidate.call(*arrays)
            return [found[i].astype(v.aval.dtype) for i, v in zip(places, outputs, strict=True)]

        return tuple(outputs), call

    def _with_addition(self, values: Values, site: Site) -> Site:
        """The op with the addition of two arrays before it, if there is one."""
        operands = self._added(values.root)
        if operands is None or site.op not in _WITH_ADDITION:
            return site
        program = self.program
        i = program.producer[values.root]
        region = site.region | {i}
        operands = (*operands, *site.operands[1:])
        at = program.operand_position(operands)
        outside = [
            u
            for v in (values.root, *site.outputs)
            for u in program.users.get(v, ())
            if u not in region
        ]
        if i in self.taken or any(u < at for u in outside):
            return site
        add = _WITH_ADDITION[site.op]
        call = functools.partial(site.call.func, add, *site.call.args[1:], **site.call.keywords)
        outputs = (*site.outputs, values.root)
        return Site(add.__name__, call, operands, outputs, region, at)

    def _added(self, v: Var) -> tuple[Any, Any] | None:
        """The two arrays of v's type whose sum is v."""
        if v not in self.program.producer:
            return None
        equation = self.program.items[self.program.producer[v]].equation
        both = equation.primitive.name == "add" and all(
            isinstance(u, Var) and u.aval.shape == v.aval.shape and u.aval.dtype == v.aval.dtype
            for u in equation.invars
        )
        repeated = any(self._is_broadcast(u) for u in equation.invars)
        return tuple(equation.invars) if both and not repeated else None

    def _is_broadcast(self, v: Any) -> bool:
        producer = self.program.producer.get(v) if isinstance(v, Var) else None
        return (
            producer is not None
            and self.program.items[producer].equation.primitive.name == "broadcast_in_dim"
        )

    def _with_bias(self, values: Values, site: Site) -> Site | None:
        """A GELU with the addition of a bias before it, if there is one."""
        program = self.program
        if self._is_gate(site.outputs[0]):
            raise Left(
                "its result is multiplied by another array, which XLA computes with the GELU"
            )
        root = values.root
        i = program.producer.get(root)
        equation = program.items[i].equation if i is not None else None
        if equation is None or equation.primitive.name != "add" or root in program.results:
            return site
        for x, bias in (equation.invars, equation.invars[::-1]):
            same = isinstance(x, Var) and x.aval.shape == root.aval.shape
            if not (same and isinstance(bias, Var) and x.aval.dtype == root.aval.dtype):
                continue
            leaf = self._vector(values, bias)
            if leaf is None or set(program.users[root]) - site.region:
                continue
            equations = search.slice_between(program, site.outputs, {x, leaf})
            region = search.unshared(program, equations, site.outputs)
            call = functools.partial(_bias_gelu, **site.call.keywords)
            return Site("bias_gelu", call, (x, leaf), site.outputs, region, site.at)
        return site

    def _vector(self, values: Values, v: Var) -> Var | None:
        """The array with one axis that `v` repeats over all axes but the last."""
        try:
            form = Values(self.program, v, [], {}, {}, {}).form_of(v)
        except NoForm:
            return None
        single = form.polynomial.single
        if single is None or single[1] != 1 or len(single[0]) != 1 or not form.dims:
            return None
        ((atom, exponent),) = single[0]
        last = [p for p in form.dims[-1]]
        if exponent != 1 or not isinstance(atom, Leaf) or len(last) != 1 or last[0].label is None:
            return None
        alone = all(p.label is None for axis in form.dims[:-1] for p in axis)
        n = values.root.aval.shape[-1]
        return atom.var if alone and last[0].size == n == math.prod(atom.var.aval.shape) else None

    def _is_gate(self, v: Var, depth: int = 3) -> bool:
        """Whether a value is multiplied by another array of its size."""
        for i in self.program.users.get(v, ()):
            equation = self.program.items[i].equation
            name = equation.primitive.name
            others = [u for u in equation.invars if isinstance(u, Var) and u is not v]
            if name == "mul" and any(u.aval.shape == v.aval.shape for u in others):
                return True
            if name in ("convert_element_type", "reshape") and depth:
                if self._is_gate(equation.outvars[0], depth - 1):
                    return True
        return False


def _bias_gelu(x: Any, bias: Any, **options: Any) -> Any:
    return bias_gelu.bias_gelu(x, bias.reshape(-1), **options)
