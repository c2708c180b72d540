"""`Turns`: a call that runs in its own thread, and only in its turns."""

import threading


class Stopped(BaseException):
    """Raised in a stopped call; not an `Exception`, so that the call does not handle it."""


class Turns:
    """Runs `call` from one of its pauses to the next, each time that `go_on` is called.

    Only one of the two threads runs at a time, so the order of everything is that of the calls.
    """

    def __init__(self, call):
        self._call = call
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._is_stopped = False
        self._error = None
        self.is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go_on(self):
        """Run to the next pause, or to the end. Propagates exceptions of the call."""
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def pause(self):
        """Wait for the next turn; called by the call. No-op in any other thread."""
        if threading.current_thread() is self._thread:
            self._back.release()
            self._turn.acquire()
            if self._is_stopped:
                raise Stopped

    def stop(self):
        """End the call where it waits."""
        if not self.is_over:
            self._is_stopped = True
            self.go_on()

    def _run(self):
        self._turn.acquire()
        try:
            if not self._is_stopped:
                self._call()
        except Stopped:
            pass
        except BaseException as error:
            self._error = error
        self.is_over = True
        self._back.release()
