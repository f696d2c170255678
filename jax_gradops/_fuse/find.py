"""Finds the ops in a jaxpr."""

# JAX declares the types of variables without shapes.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from jax.extend.core import Var

from jax_gradops._fuse import additions, check, search, skipped
from jax_gradops._fuse.patterns import channel_norms, clip, gelu, lookups, losses, norms
from jax_gradops._fuse.patterns.candidate import Candidate, Left
from jax_gradops._fuse.polynomial import TooLong
from jax_gradops._fuse.program import Program, Site, has_symbolic_shape
from jax_gradops._fuse.report import Report
from jax_gradops._fuse.search import Values
from jax_gradops._fuse.skipped import Reason

# Groups of patterns. A group is tried if none before it has found an op.
PATTERNS: dict[str, tuple[tuple[Callable[[Values, Var], Candidate | None], ...], ...]] = {
    "norm": ((norms.row_norm, channel_norms.channel_norm), (norms.norm_before_affine,)),
    "gelu": ((gelu.gelu,),),
    "loss": ((losses.loss,),),
}

_SHARED = "a value inside is used elsewhere, too"
_OVER_DEVICES = (
    "its statistics are sums over a mapped axis (psum or pmean). jax_gradops.batch_norm computes "
    "such statistics with axis_name="
)


class Finder:
    """Finds the ops in one jaxpr."""

    def __init__(self, program: Program, report: Report) -> None:
        self.program, self.report = program, report
        self.sites: list[Site] = []
        self.taken: set[int] = set()
        self._values: dict[Var, Values] = {}
        self._reasons: dict[int, Reason] = {}

    def run(self) -> list[Site]:
        for i, item in enumerate(self.program.items):
            kind = search.kind(item.equation)
            if kind and has_symbolic_shape(item.equation):
                self.report.left(kind, self.program.source(i), "its shape is symbolic")
            elif kind and i not in self.taken:
                with self.report.guard(kind, self.program.source(i)):
                    self._around(i, kind)
        # After the norms, because a norm takes the cast of its array first.
        self._each("gather", "embedding", lookups.lookup)
        equations = [item.equation for item in self.program.items]
        if equations and not any(map(has_symbolic_shape, equations)):
            with self.report.guard("function", self.program.source(0)):
                for line in skipped.lines(self.program, self.taken, self._reasons):
                    self.report.left(line.kind, self.program.source(line.anchor), line.why)
        # Last, because a norm or a GELU takes the bias before it first.
        self._each("add", "bias", additions.of_product)
        return self.sites

    def _each(
        self, primitive: str, kind: str, site_of: Callable[[Program, int, set[int]], Site | None]
    ) -> None:
        """Looks for ops that equations of one primitive show."""
        for i, item in enumerate(self.program.items):
            if item.equation.primitive.name != primitive or i in self.taken:
                continue
            source = self.program.source(i)
            with self.report.guard(kind, source):
                try:
                    site = site_of(self.program, i, self.taken)
                except Left as left:
                    self.report.left(kind, source, str(left))
                    continue
                if site and self._fits(site):
                    self._take(site, "")

    def _around(self, anchor: int, kind: str) -> None:
        """Looks for an op around an equation that may be a part of one."""
        named, why = kind, list[str]()
        if kind == "norm":
            try:
                site = clip.clip(self.program, anchor)
            except Left as left:
                site, named = None, "clip"
                why.append(str(left))
            if site and not site.region & self.taken and self._fits(site):
                self._take(site, "")
                return
        stopped, shows = "", self.program.items[anchor].equation.outvars[0]
        roots = search.roots(self.program, anchor)
        for patterns, root in itertools.product(PATTERNS[kind], roots):
            if root not in self._values:
                self._values[root] = search.values_from(self.program, root)
            values = self._values[root]
            if shows not in values.forms:
                stopped = stopped or (search.why_stopped(values, shows) if kind == "norm" else "")
                continue
            # An op's result may have a name. The name stays.
            found = [v for v in values.forms if not search.is_named(self.program, v)]
            for v, pattern in itertools.product(reversed(found), patterns):
                try:
                    candidate = pattern(values, v)
                    site = candidate and self._site(values, candidate, anchor)
                except Left as left:
                    why.append(str(left))
                    continue
                except TooLong:
                    continue
                if candidate and site and self._fits(site):
                    self._take(site, candidate.options)
                    return
        if kind == "norm" and search.is_over_devices(self.program, anchor):
            why.insert(0, _OVER_DEVICES)
        of_kind = {"norm": norms.why_left, "loss": losses.why_left}.get(kind)
        followed = [self._values[root] for root in roots if shows in self._values[root].forms]
        others = [of_kind(values, shows) for values in followed] if of_kind else []
        reasons = [each for each in (*why, *others, stopped) if each]
        if reasons:
            # A square root of a sum of squares is often no part of a norm.
            rank = skipped.SURE if why or kind != "norm" else skipped.UNSURE
            self._reasons[anchor] = Reason(named, reasons[0], rank)

    def _fits(self, site: Site) -> bool:
        """Whether the operands of all ops are still computed, and before the ops."""
        sites, producer = (*self.sites, site), self.program.producer
        made = {v for each in sites for v in each.outputs}
        removed = self.taken | site.region
        operands = {v for each in sites for v in each.operands} - made
        if any(producer.get(v) in removed for v in operands):
            return False
        return not any(
            each.at <= site.at and set(each.operands) & set(site.outputs) for each in self.sites
        )

    def _take(self, site: Site, options: str) -> None:
        site = self.program.with_equations(site)
        self.sites.append(site)
        self.taken |= site.region
        self.program.moved |= dict.fromkeys(site.outputs, site.at)
        source = self.program.source(self.program.producer[site.outputs[0]])
        inside = [self.program.items[i].equation for i in sorted(site.region)]
        names = [e.params["name"] for e in inside if e.primitive.name == "name"]
        if names:
            names = ", ".join(map(repr, dict.fromkeys(names)))
            gone = f"checkpoint_name {names} on a value inside has no effect now"
            options = "; ".join([options, gone] if options else [gone])
        operands = [self.program.as_written(v, site) for v in site.operands]
        self.report.found(site.op, operands, source, options)

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
                raise Left(losses.SHARED if "entropy" in candidate.op else _SHARED)
        at = program.producer[output]
        if len(outputs) > 1:
            at = program.operand_position(candidate.operands)
            if any(u < at and u not in region for v in outputs for u in program.users.get(v, ())):
                raise Left("a parameter is computed from the statistics")
        site = Site(candidate.op, call, candidate.operands, outputs, region, at)
        if candidate.before is not None:
            take_over = additions.ADDITIONS[candidate.before.kind]
            added = take_over(values, site, candidate.before, self.taken)
            if added is not site:
                with contextlib.suppress(Left):  # the op alone may be equal
                    key = check.equal(values, candidate, sorted(equations), added)
                    return dataclasses.replace(added, key=key)
        key = check.equal(values, candidate, sorted(equations))
        # Which statistics the site returns is not compared.
        return dataclasses.replace(site, key=None if len(outputs) > 1 else key)

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
            labels = [part.label for axis in values.forms[v].dims for part in axis]
            if labels != sorted(p.axes):
                continue  # repeated along other axes, or in another order
            for place, statistic in enumerate(candidate.statistics, 1):
                if p.close_to(statistic):
                    outputs.append(v)
                    places.append(place)
                    break

        def call(*arrays: Any) -> Any:
            found = candidate.call(*arrays)
            return [found[i].astype(v.aval.dtype) for i, v in zip(places, outputs, strict=True)]

        return tuple(outputs), call
