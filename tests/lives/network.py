"""`Link`: a network that loses, repeats and delays messages; `Reader`: reads bytes over it."""

import numpy as np
from lives.contents import BLOCK_SIZE

from kv_pool.errors import PeerUnavailableError, TransferFailedError
from kv_pool.migration.messages import AcknowledgeTransfer
from kv_pool.migration.transfer_backend import ReadCount


class Link:
    """The source of one pull, reached over the network. See `PeerLinks`."""

    def __init__(self, moving):
        self.moving = moving
        self.world = moving.world
        self.source = moving.source.source_role

    def call(self, name, message, timeout_s):
        world = self.world
        is_last = isinstance(message, AcknowledgeTransfer)
        self.pause(0.8 if is_last else 0.3)
        draw = 1.0 if world.is_calm else world.rng.random() / (8 if is_last else 1)
        if draw < 0.02:
            raise PeerUnavailableError("the request was lost")
        if draw < 0.03:
            self.source.late.append(message)
            raise PeerUnavailableError("the request is late")
        reply = self.source.deliver(message)
        if draw < 0.06:
            raise PeerUnavailableError("the reply was lost")
        if draw < 0.08:
            reply = self.source.deliver(message)
        if draw < 0.1:
            self.source.late.append(message)
        self.pause()
        return reply

    def pause(self, share=0.3):
        if self.world.chance(share):
            self.moving.turns.pause()

    def take_reader(self, source, only):
        if not self.world.is_calm and self.world.chance(0.02):
            raise PeerUnavailableError("no connection")
        return Reader(self)

    def return_reader(self, source, reader):
        pass


class Reader:
    """Copies blocks row by row. A cancelled read may still write; see `BlockReader`."""

    def __init__(self, link):
        self.link = link
        self.is_late = False

    def read(self, transfer_id, remote_ids, local_ids, deadline):
        link, world, moving = self.link, self.link.world, self.link.moving
        transfers, writer = link.source.transfers, moving.writer
        transfers.check_leased(transfer_id, remote_ids)
        rows = moving.source.device.kv
        half = len(remote_ids) // 2
        for position, (source_id, target_id) in enumerate(zip(remote_ids, local_ids, strict=True)):
            if position == half:
                link.pause()
                transfers.check_leased(transfer_id, remote_ids)
                self.fail_sometimes()
            row = rows[source_id].copy()
            if not world.is_calm and world.chance(0.06):
                row[world.rng.randrange(BLOCK_SIZE)] ^= np.uint64(1)
            writer.write_row(target_id, row)
        link.pause()
        transfers.check_leased(transfer_id, remote_ids)
        return ReadCount(len(remote_ids) * rows[0].nbytes, 1)

    def fail_sometimes(self):
        draw = 1.0 if self.link.world.is_calm else self.link.world.rng.random()
        if draw < 0.1:
            self.is_late = draw < 0.07
            raise TransferFailedError("the connection broke")

    def is_settled(self):
        return not self.is_late

    def is_usable(self):
        return True

    def close(self):
        pass
