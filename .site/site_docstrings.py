"""An extension of griffe, which reads the docstrings for the API reference."""

from typing import Any

from griffe import Extension, Object
from site_api import name_exceptions, split_names


class Entries(Extension):
    """Completes the entries of lists for Google style, which wants one name and one description for each."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = name_exceptions(split_names(obj.docstring.value))
