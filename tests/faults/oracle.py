"""The checker's answers by brute force: the transitive closure of all steps, and every pair of accesses."""

from itertools import combinations

from millstream.check import LifetimeFault
from millstream.graph import Allocate, Free, Launch, Record, Role, Wait


class Oracle:
    """Which step is before which, from the edges alone: no clocks, no shortcuts."""

    def __init__(self, plan):
        self.plan = plan
        self.graph = plan.graph
        last_on, record_of = {}, {}
        self.before_mask = []  # for each step the set of steps before it, as bits
        for position, step in enumerate(plan.steps):
            mask = 0
            for edge in (last_on.get(step.stream), record_of.get(step.event) if isinstance(step, Wait) else None):
                if edge is not None:
                    mask |= self.before_mask[edge] | 1 << edge
            self.before_mask.append(mask)
            last_on[step.stream] = position
            if isinstance(step, Record):
                record_of[step.event] = position
        self.end_mask = self.before_mask[last_on[0]] | 1 << last_on[0] if 0 in last_on else 0

    def before(self, first, second):
        return bool(self.before_mask[second] >> first & 1)

    def storages(self, names):
        return {self.graph.storage(name) for name in names}

    def accesses(self):
        """(position, kernel, reads, writes) of each launch."""
        for position, step in enumerate(self.plan.steps):
            if isinstance(step, Launch):
                kernel = self.graph.kernels[step.kernel]
                yield position, kernel.id, self.storages(kernel.reads), self.storages(kernel.writes)

    def parts(self, kernel):
        return self.storages(self.graph.kernels[kernel].parts)

    def races(self):
        """{(buffer, position that must be first, position that must be second)}"""
        found = set()
        for pair in combinations(self.accesses(), 2):
            swapped = pair[0][1] > pair[1][1]
            one, other = reversed(pair) if swapped else pair
            if not self.before(one[0], other[0]):
                conflicts = one[3] & (other[2] | other[3]) | one[2] & other[3]
                conflicts -= self.parts(one[1]) & self.parts(other[1])
                found |= {(buffer, one[0], other[0]) for buffer in conflicts}
        return found

    def lifetime_errors(self):
        """{(buffer, fault, positions)}; of a missing join only the stream, as (None, fault, (stream,))."""
        found = set()
        for buffer in self.graph.buffers:
            if buffer.alias_of is None and buffer.role in (Role.TEMPORARY, Role.OUTPUT):
                found |= {(buffer.id, fault, at) for fault, at in self.life_errors(buffer.id)}
        for position, *_ in self.accesses():
            if not self.end_mask >> position & 1:
                found.add((None, LifetimeFault.MISSING_JOIN, (self.plan.steps[position].stream,)))
        return found

    def life_errors(self, buffer):
        steps = self.plan.steps
        uses = [position for position, _, reads, writes in self.accesses() if buffer in reads | writes]
        births = [
            position
            for position, step in enumerate(steps)
            if step == Allocate(buffer, step.stream)
            or (isinstance(step, Launch) and buffer in self.graph.kernels[step.kernel].allocates)
        ]
        deaths = [position for position, step in enumerate(steps) if step == Free(buffer, step.stream)]
        if not births and uses:
            yield LifetimeFault.NEVER_ALLOCATED, (uses[0],)
        for birth in births[1:]:
            yield LifetimeFault.ALLOCATED_TWICE, (births[0], birth)
        for use in uses:
            if births and use != births[0] and not self.before(births[0], use):
                yield LifetimeFault.USE_BEFORE_ALLOCATE, tuple(sorted((use, births[0])))
        if deaths:
            yield from self.death_errors(uses, births, deaths)

    def death_errors(self, uses, births, deaths):
        steps = self.plan.steps
        for death in deaths[1:]:
            yield LifetimeFault.FREED_TWICE, (deaths[0], death)
        if not births:
            yield LifetimeFault.FREE_BEFORE_ALLOCATE, (deaths[0],)
        elif births[0] > deaths[0]:
            yield LifetimeFault.FREE_BEFORE_ALLOCATE, (deaths[0], births[0])
        elif steps[births[0]].stream != steps[deaths[0]].stream:
            yield LifetimeFault.FREED_ELSEWHERE, (births[0], deaths[0])
        for use in uses:
            if use > deaths[0]:
                yield LifetimeFault.USE_AFTER_FREE, (deaths[0], use)
            elif not self.before(use, deaths[0]):
                yield LifetimeFault.EARLY_FREE, (use, deaths[0])
