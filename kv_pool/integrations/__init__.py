"""The pool under engines that bring their own scheduler."""
