"""Events of an engine's or a connector's own classes, which have our names and our fields."""

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockReported, BlockStored
from kv_pool.errors import InvalidTypeError

OWN_CLASSES = (BlockStored, BlockRemoved, AllBlocksCleared)
_BY_NAME = {own.__name__: own for own in (*OWN_CLASSES, BlockReported)}


def adopt(event: object) -> BlockStored | BlockRemoved | AllBlocksCleared:
    """The event as one of ours; itself if it is one. The lists in it are the same.

    Raises:
        InvalidTypeError: its class is not called as one of ours is, or it lacks a field.
    """
    if isinstance(event, OWN_CLASSES):
        return event
    own = _BY_NAME.get(type(event).__name__)
    if own is None:
        raise InvalidTypeError(
            f"a {type(event).__name__} can not be sent; readers know BlockStored, BlockRemoved and "
            "AllBlocksCleared"
        )
    fields = {name: getattr(event, name) for name in own.__struct_fields__ if hasattr(event, name)}
    try:
        return own(**fields)
    except TypeError as error:
        raise InvalidTypeError(f"a {type(event).__name__} that can not be sent: {error}") from error
