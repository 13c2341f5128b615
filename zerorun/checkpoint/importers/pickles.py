"""Read pickles that strangers have made by rules: which opcodes, what may be called with what, what may get attributes.

pickle's own reader does what the file says. Even with a list of harmless classes, it gives attributes to anything on its
stack, such as the classes themselves, makes room for whatever number of entries or bytes the file names, and computes the
hash of any key, which takes forever for a tuple of tuples of the same tuples. Here the only opcodes are those that
protocols 2 to 5 need for plain values, and those that call something or set attributes. With ``make`` and ``fill``, a
subclass says what becomes of the latter. Time and memory are in proportion to the file.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

_MOST_IN_KEY = 100  # values, in a tuple that is a key

_OPCODES = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2"),
    *("LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "SHORT_BINSTRING"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM"),
    *("SETITEMS", "EMPTY_SET", "ADDITEMS", "FROZENSET", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "MEMOIZE"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"),
)


class RuledUnpickler(pickle._Unpickler):
    """Passes what the pickle asks for to ``find_class``, ``make`` and ``fill``, which a subclass defines.

    ``file`` is a BytesIO or the like, which returns no more than it has, whatever length is asked for. ``load`` raises
    UnpicklingError for what is against the rules, and whatever else damage leads to.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def make(self, kind: Any, args: Any) -> Any:
        """Return what ``kind(*args)`` is to give, or raise UnpicklingError. ``kind`` need not be from ``find_class``."""
        raise pickle.UnpicklingError(f"it calls {kind!r:.80}")

    def fill(self, made: Any, state: Any) -> None:
        """Set the attributes of ``made``, or raise UnpicklingError. ``made`` may be anything that is in the pickle."""
        raise pickle.UnpicklingError(f"it changes a {type(made).__name__}")

    def _load_made(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.make(self.stack[-1], args)

    def _load_build(self) -> None:
        state = self.stack.pop()
        self.fill(self.stack[-1], state)

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set_all(self.stack[-1], [key, value])

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        _set_all(self.stack[-1], items)

    def _load_append(self) -> None:
        value = self.stack.pop()
        _list(self.stack[-1]).append(value)

    def _load_appends(self) -> None:
        items = self.pop_mark()
        _list(self.stack[-1]).extend(items)

    def _load_additems(self) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is not set:
            raise pickle.UnpicklingError(f"it adds to a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(map(_key, items))

    def _load_frozenset(self) -> None:
        items = self.pop_mark()
        self.stack.append(frozenset(map(_key, items)))


_HANDLERS: dict[int, Any] = {
    **{code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES)},
    pickle.REDUCE[0]: RuledUnpickler._load_made,
    pickle.NEWOBJ[0]: RuledUnpickler._load_made,
    pickle.BUILD[0]: RuledUnpickler._load_build,
    pickle.APPEND[0]: RuledUnpickler._load_append,
    pickle.APPENDS[0]: RuledUnpickler._load_appends,
    pickle.SETITEM[0]: RuledUnpickler._load_setitem,
    pickle.SETITEMS[0]: RuledUnpickler._load_setitems,
    pickle.ADDITEMS[0]: RuledUnpickler._load_additems,
    pickle.FROZENSET[0]: RuledUnpickler._load_frozenset,
}
RuledUnpickler.dispatch = _HANDLERS


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise pickle.UnpicklingError(f"it appends to a {type(value).__name__}")
    return value


def _set_all(target: Any, items: list[Any]) -> None:
    if type(target) is not dict:
        raise pickle.UnpicklingError(f"it sets items of a {type(target).__name__}")
    for index in range(0, len(items), 2):
        target[_key(items[index])] = items[index + 1]


def _key(value: Any) -> Any:
    """Return ``value`` if its hash is computed quickly; otherwise raise UnpicklingError."""
    left = [value]
    for _ in range(_MOST_IN_KEY):
        if not left:
            return value
        item = left.pop()
        left.extend(item if isinstance(item, (tuple, frozenset)) else ())
    raise pickle.UnpicklingError("a key is too long")
