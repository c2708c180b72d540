"""Interrupt calls by an exception, as a signal handler does, at each possible point or a random one."""

import _weakrefset
import dis
import functools
import gc
import inspect
import itertools
import logging
import random
import signal
import sys
from contextlib import contextmanager

# Frames entered by a C function: CPython checks for signals once that function returns.
_ENTERED_BY_C = {"__init__", "__post_init__", "__new__", "<genexpr>", "<lambda>", "<listcomp>", "__del__"}
_CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW"}
# An interrupt between a log handler's lock and its `try` would never release the lock, and block every thread
# that logs later. This is a limitation of Python, so nothing is raised there.
_LOGGING = logging.__file__
# Exceptions in callbacks of weak references, as those of a `WeakSet`, are ignored.
_WITHOUT_INTERRUPTS = {_LOGGING, _weakrefset.__file__}


class Interrupt(BaseException):
    """The exception of the handler; like `KeyboardInterrupt`, it is not an `Exception`."""


@functools.cache
def _find_opcode_names(code):
    return {one.offset: one.opname for one in dis.get_instructions(code)}


class _OpcodeTrace:
    """A trace function that raises where CPython would run a signal handler; see `interrupt_at`."""

    def __init__(self, moment):
        self.left = moment
        self.last_opcode = {}
        self.children = {}

    def count(self):
        self.left -= 1
        if self.left == 0:
            raise Interrupt

    def __call__(self, frame, event, argument):
        if event == "call":
            if frame.f_code.co_filename in _WITHOUT_INTERRUPTS:
                return None
            parent = frame.f_back
            self.children.setdefault(id(parent), []).append(frame.f_code.co_name)
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            self.last_opcode[id(frame)] = None
            self.children.pop(id(frame), None)
            # A resumed generator may be about to be closed, where CPython runs no handler.
            if not (frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_lasti >= 0):
                self.count()
        elif event == "opcode":
            names = _find_opcode_names(frame.f_code)
            last = self.last_opcode.get(id(frame))
            entered = self.children.pop(id(frame), [])
            self.last_opcode[id(frame)] = names.get(frame.f_lasti)
            if last == "JUMP_BACKWARD":
                self.count()
            elif last in _CALLS:
                # Python code called by Python code runs in the same loop, without a check at its return.
                is_plain = (
                    last != "CALL_FUNCTION_EX" and len(entered) == 1 and entered[0] not in _ENTERED_BY_C
                )
                if not is_plain:
                    self.count()
        return self


def interrupt_at(moment, call):
    """Run `call()` and raise `Interrupt` at its `moment`-th point, counted from 1.

    Points are the places where CPython runs signal handlers: on entry to a Python function, at a jump
    backwards, after a call of a C function. Compiled code has none.

    Returns:
        True if the call was interrupted, False if it has run to its end.
    """
    trace = _OpcodeTrace(moment)
    before = sys.gettrace()
    gc.disable()  # exceptions in finalizers, also of what other tests have left, are ignored
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
        gc.enable()
    return False


def interrupt_everywhere(make, call, check):
    """For each point: `subject = make()`, interrupt `call(subject)`, then `check(subject)`.

    Returns:
        The number of points, and a list of (point, error) for each at which `check` failed.
    """
    broken = []
    for moment in itertools.count(1):
        subject = make()
        if not interrupt_at(moment, lambda subject=subject: call(subject)):
            return moment - 1, broken
        try:
            check(subject)
        except Exception as error:
            broken.append((moment, error))
    return None


@contextmanager
def alarm_that_raises():
    """Let SIGALRM raise `Interrupt` within the `with` block; trigger it with `signal.setitimer`."""

    def on_alarm(number, frame):
        while frame is not None:
            if frame.f_code.co_filename == _LOGGING:
                signal.setitimer(signal.ITIMER_REAL, 1e-5)
                return
            frame = frame.f_back
        raise Interrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    gc.disable()  # exceptions in its callbacks and in finalizers are ignored
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


def run_until_interrupted(step, rng: random.Random, longest_s=0.0004):
    """Call `step()` repeatedly until a signal at a random time raises.

    A signal whose exception is ignored, because it arrives in a finalizer, is sent again.
    """
    try:
        while True:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, longest_s))
            for _ in range(10_000):
                step()
    except Interrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
