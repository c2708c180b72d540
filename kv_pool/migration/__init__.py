"""Migration of blocks between pools of one process, of several processes, and of several nodes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.errors import (
        InvalidContentError,
        LayoutMismatchError,
        MigrationCancelledError,
        MigrationError,
        MigrationInDoubtError,
        PeerAuthenticationError,
        PeerUnavailableError,
        StaleTransferError,
        TransferFailedError,
    )
    from kv_pool.migration.backends.in_process import InProcessBackend
    from kv_pool.migration.backends.nixl import NixlBackend
    from kv_pool.migration.backends.tcp import TcpBackend
    from kv_pool.migration.channel import Channel
    from kv_pool.migration.manager_sequences import ManagerSequences
    from kv_pool.migration.migrator import Migrator
    from kv_pool.migration.peers import parse_peer, read_peers
    from kv_pool.migration.pool_site import PoolSite
    from kv_pool.migration.pull_settings import PullSettings
    from kv_pool.migration.remote_calls import RemoteCalls
    from kv_pool.migration.secret import load_secret, write_secret_file
    from kv_pool.migration.sequence_owner import NoOwner, SequenceOwner
    from kv_pool.migration.sequences import Sequences
    from kv_pool.migration.status import MigrationPhase, MigrationRecord, MigrationStatus
    from kv_pool.migration.subjects import BlocksSubject, PrefixSubject, SequenceSubject
    from kv_pool.migration.topology import Topology, read_topology
    from kv_pool.migration.transfer_backend import BlockReader, ReadCount, TransferBackend
else:
    from kv_pool.lazy_names import export_lazily

    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "kv_pool.errors": (
                "MigrationError",
                "TransferFailedError",
                "StaleTransferError",
                "InvalidContentError",
                "MigrationCancelledError",
                "MigrationInDoubtError",
                "PeerUnavailableError",
                "PeerAuthenticationError",
                "LayoutMismatchError",
            ),
            "kv_pool.migration.backends.in_process": ("InProcessBackend",),
            "kv_pool.migration.backends.nixl": ("NixlBackend",),
            "kv_pool.migration.backends.tcp": ("TcpBackend",),
            "kv_pool.migration.channel": ("Channel",),
            "kv_pool.migration.manager_sequences": ("ManagerSequences",),
            "kv_pool.migration.migrator": ("Migrator",),
            "kv_pool.migration.peers": (
                "read_peers",
                "parse_peer",
            ),
            "kv_pool.migration.pool_site": ("PoolSite",),
            "kv_pool.migration.pull_settings": ("PullSettings",),
            "kv_pool.migration.remote_calls": ("RemoteCalls",),
            "kv_pool.migration.secret": (
                "load_secret",
                "write_secret_file",
            ),
            "kv_pool.migration.sequence_owner": (
                "SequenceOwner",
                "NoOwner",
            ),
            "kv_pool.migration.sequences": ("Sequences",),
            "kv_pool.migration.status": (
                "MigrationStatus",
                "MigrationPhase",
                "MigrationRecord",
            ),
            "kv_pool.migration.subjects": (
                "SequenceSubject",
                "PrefixSubject",
                "BlocksSubject",
            ),
            "kv_pool.migration.topology": (
                "Topology",
                "read_topology",
            ),
            "kv_pool.migration.transfer_backend": (
                "TransferBackend",
                "BlockReader",
                "ReadCount",
            ),
        },
    )

__all__ = [
    "Migrator",
    "PoolSite",
    "ManagerSequences",
    "Sequences",
    "SequenceOwner",
    "NoOwner",
    "SequenceSubject",
    "PrefixSubject",
    "BlocksSubject",
    "MigrationStatus",
    "MigrationPhase",
    "MigrationRecord",
    "PullSettings",
    "Topology",
    "read_topology",
    "read_peers",
    "parse_peer",
    "load_secret",
    "write_secret_file",
    "TransferBackend",
    "BlockReader",
    "ReadCount",
    "Channel",
    "RemoteCalls",
    "InProcessBackend",
    "TcpBackend",
    "NixlBackend",
    "MigrationError",
    "TransferFailedError",
    "StaleTransferError",
    "InvalidContentError",
    "MigrationCancelledError",
    "MigrationInDoubtError",
    "PeerUnavailableError",
    "PeerAuthenticationError",
    "LayoutMismatchError",
]
