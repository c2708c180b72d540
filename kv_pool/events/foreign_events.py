"""Events of an engine's or a connector's own classes, with the same names and fields as kv_pool's."""

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockReported, BlockStored
from kv_pool.errors import InvalidTypeError

OWN_CLASSES = (BlockStored, BlockRemoved, AllBlocksCleared)
_BY_NAME = {own.__name__: own for own in (*OWN_CLASSES, BlockReported)}


def adopt(event: object) -> BlockStored | BlockRemoved | AllBlocksCleared:
    """Return the event as a kv_pool event; the same object if it is one already. Its lists are shared.

    Raises:
        InvalidTypeError: its class has none of the known names, or it lacks a field.
    """
    if isinstance(event, OWN_CLASSES):
        return event
    own = _BY_NAME.get(type(event).__name__)
    if own is None:
        raise InvalidTypeError(
            f"a {type(event).__name__} cannot be sent; readers know BlockStored, BlockRemoved and "
            "AllBlocksCleared"
        )
    fields = {name: getattr(event, name) for name in own.__struct_fields__ if hasattr(event, name)}
    try:
        return own(**fields)
    except TypeError as error:
        raise InvalidTypeError(f"a {type(event).__name__} cannot be sent: {error}") from error
