"""`ManagerInterrupts`: interrupted calls of a manager and its companions."""

from lives.interrupts import Interrupts

from kv_pool.contiguous import compaction
from kv_pool.errors import PinLimitError


class ManagerInterrupts(Interrupts):
    """The calls of a `ManagerNode` that can be interrupted."""

    def list_breakable(self):
        calls = [*super().list_breakable(), self.break_pack]
        if self.running:
            calls += [
                self.break_free,
                self.break_fork,
                self.break_growth,
                self.break_cache,
                self.break_swap_out,
            ]
        if self.running or self.waiting:
            calls.append(self.break_keep)
        if self.waiting:
            calls.append(self.break_admit)
        if self.swapped:
            calls.append(self.break_swap_in)
        if self.planned:
            calls.append(self.break_closing)
        return calls

    def settle(self):
        super().settle()
        assert self.retention.num_pins >= 0
        self.swapper.list_open_plans()
        self.onboarder.list_open_plans()

    def break_free(self):
        sequence = self.rng.choice(self.running)
        self.interrupt(lambda: self.manager.free(sequence.request))
        if not self.has_sequence(sequence):
            self.running.remove(sequence)
        return "free"

    def break_fork(self):
        parent = self.rng.choice(self.running)
        num_computed = parent.request.num_computed_tokens
        if num_computed:
            tokens = parent.request.all_token_ids[:num_computed]
            child = self.world.make_sequence([*tokens, *self.world.draw_tokens(1)])
            child.request.num_computed_tokens = num_computed
            self.interrupt(lambda: self.manager.fork(parent.request, child.request))
            if self.has_sequence(child):
                self.running.append(child)
        return "fork"

    def break_growth(self):
        """Allocate slots for a step that does not happen."""
        sequence = self.rng.choice(self.running)
        if not sequence.num_left:
            sequence.append(self.world.draw_tokens(2))
        self.interrupt(
            lambda: self.manager.allocate_slots(sequence.request, sequence.num_left, delay_cache_blocks=True)
        )
        return "allocate_slots"

    def break_cache(self):
        request = self.rng.choice(self.running).request
        self.interrupt(lambda: self.manager.cache_blocks(request, request.num_computed_tokens))
        return "cache_blocks"

    def break_admit(self):
        """Admit a request, and preempt it if it was admitted."""
        sequence = self.rng.choice(self.waiting)
        self.interrupt(lambda: self.onboarder.admit(sequence.request, 1, delay_cache_blocks=True))
        for plan in self.onboarder.list_open_plans():
            if plan.request_id == sequence.name:
                plan.abort()
        if self.has_sequence(sequence):
            self.manager.free(sequence.request)
        sequence.request.num_computed_tokens = 0
        return "admit"

    def break_swap_out(self):
        sequence = self.rng.choice(self.running)
        self.run([])
        self.interrupt(lambda: self.swapper.swap_out(sequence.request))
        self.look_for_plan(sequence, self.running)
        return "swap_out"

    def break_swap_in(self):
        sequence = self.rng.choice(self.swapped)
        self.interrupt(lambda: self.swapper.swap_in(sequence.request))
        self.look_for_plan(sequence, self.swapped)
        return "swap_in"

    def look_for_plan(self, sequence, place):
        for plan in self.swapper.list_open_plans():
            if plan.request_id == sequence.name:
                place.remove(sequence)
                self.open_swap(sequence, plan)

    def break_closing(self):
        opened = self.rng.choice(list(self.planned.values()))
        is_done = not self.is_onboard_plan(opened) and self.world.chance(0.5)
        return self.end_plan(opened, is_done, self.close_again)

    def close_again(self, close, plan):
        self.interrupt(close)
        if plan in [*self.swapper.list_open_plans(), *self.onboarder.list_open_plans()]:
            close()

    def break_keep(self):
        request = self.rng.choice([*self.running, *self.waiting]).request
        retention = self.retention
        call = self.rng.choice(
            (
                lambda: retention.set_directives(request.request_id, [self.draw_directive()]),
                lambda: retention.change_directives(request, [self.draw_directive()]),
                lambda: retention.keep_session("a", request, self.world.now + 5.0),
                lambda: retention.end_session("a"),
            )
        )
        try:
            self.interrupt(call)
        except PinLimitError:
            return "keep, refused"
        return "keep"

    def break_pack(self):
        copy = self.device.storage.apply_moves
        self.interrupt(lambda: compaction.pack(self.pool, copy, max_moves=3, on_moved=self.note_moved))
        return "pack"
