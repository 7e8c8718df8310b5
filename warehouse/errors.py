"""What the store raises and warns of, for callers that tell one failure from another. Not here: when (``store.py``, ``files.py``, ``remote.py``)."""


class StoreError(RuntimeError):
    """The base of what the store raises about itself."""


class ArtifactMissingError(StoreError):
    """No artifact of that digest, or only a damaged one, which has been set aside."""


class ActionMismatchError(StoreError):
    """The entry of a key holds another action than the one asked for."""


class EmptyArtifactError(StoreError):
    """A build that wrote no file."""


class StoreFullError(StoreError):
    """No space, or no quota, is left."""


class DamagedArtifact(UserWarning):
    """An artifact or entry was damaged and has been set aside; it will be made again."""


class RefusedFileError(StoreError):
    """A file that an artifact may not hold."""


class RemoteError(StoreError):
    """The remote store could not be reached, or refused."""
