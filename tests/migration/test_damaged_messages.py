"""Damaged messages get typed errors and leave the node unchanged."""

import random
from contextlib import closing, suppress

import msgspec
import pytest
from damage import craft_or_damage
from migration.made_channels import LONG
from migration.made_nodes import MadeEngine

from kv_pool import KVPoolError
from kv_pool.errors import InvalidArgumentError, TransferFailedError
from kv_pool.migration import messages
from kv_pool.migration.backends.tcp import TcpBackend, list_rows
from kv_pool.migration.messages import BlocksSubject, PrefixSubject, SequenceSubject
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.remote_calls import RemoteCalls

SECRET = b"the secret of all nodes"
ID = b"t" * 16


def make_node(name="n"):
    engine = MadeEngine()
    engine.start("r", range(20))
    backends = [TcpBackend(engine.storage)]
    return engine, Migrator(name, engine.site, backends=backends, listen="127.0.0.1:0", secret=SECRET)


def list_messages(layout, block_hashes):
    subjects = [BlocksSubject((1, 2), (1, 1)), SequenceSubject("r"), PrefixSubject(tuple(block_hashes))]
    return [
        messages.DescribeNode(),
        messages.AnnounceNode("m", "e", "127.0.0.1:1", messages.NodeLocation("n"), 3.0),
        *(messages.PrepareTransfer(ID, subject, True, layout, "m") for subject in subjects),
        *(messages.PullSubject(ID, subject, False, "m", "127.0.0.1:1", 1.0) for subject in subjects),
        messages.AskChecksums(ID, [0, 1]),
        messages.RenewLease(ID),
        messages.AcknowledgeTransfer(ID, "e", [1, 2]),
        messages.CancelTransfer(ID, "because"),
        messages.AskPull(ID, True),
    ]


@pytest.mark.parametrize("seed", range(60))
def test_a_node_answers_damaged_messages_with_typed_errors(seed):
    rng = random.Random(seed)
    engine, node = make_node()
    known = list_messages(engine.site.layout, engine.requests["r"].block_hashes)
    with node:
        for _ in range(25):
            data = messages.encode_message(rng.choice(known))
            if rng.random() < 0.8:
                data = craft_or_damage(rng, data)
            with suppress(KVPoolError):
                messages.encode_message(node.answer(messages.decode_message(data), "m"))
        for migration in node.list_migrations():
            node.find_migration(migration.migration_id).cancel()
        node.check_invariants()
    engine.check_bytes("r")  # the leases have ended


@pytest.mark.parametrize("seed", range(20))
def test_damaged_descriptions_and_reads_get_typed_errors(seed, caplog):
    rng = random.Random(seed)
    engine, node = make_node()
    rows = msgspec.msgpack.encode(list_rows(engine.storage))
    with node, closing(RemoteCalls(node.address, SECRET, "m")) as calls:
        for _ in range(5):
            with suppress(KVPoolError):
                told = craft_or_damage(rng, rows) if rng.random() < 0.5 else rows
                bulk = calls.connect_bulk(messages.OpenBulk("tcp", told), LONG)
                with closing(bulk.channel):
                    data = messages.encode_message(messages.ReadBlocks(bulk.ticket, ID, [1, 2, 5]))
                    calls.call(messages.decode_message(craft_or_damage(rng, data)), LONG)
        node.check_invariants()
    assert "failed to" not in caplog.text  # logged for errors that are not a KVPoolError


def test_text_with_a_lone_surrogate_is_not_sent():
    with pytest.raises(InvalidArgumentError, match="cannot encode PullSubject"):
        messages.encode_message(messages.PullSubject(ID, SequenceSubject("\ud800"), True, "n"))


def test_checksums_of_a_wrong_size_fail_the_transfer():
    """Regression: seven bytes raised a ValueError of numpy."""
    source, target = make_node("s"), make_node("t")
    answer = source[1].answer
    hashes = source[0].requests["r"].block_hashes
    target[0].finish("r")
    assert target[0].manager.reset_prefix_cache()
    with source[1] as giver, target[1] as taker:
        taker._links.connect("s", lambda message, caller: answer_short(answer, message, caller))
        taker.peers.add("s", giver.address)
        migration = taker.fetch(PrefixSubject(tuple(hashes)), "s")
        with pytest.raises(TransferFailedError, match="7 bytes of checksums"):
            migration.wait(LONG)
        giver.check_invariants()


def answer_short(answer, message, caller):
    """Return a node's reply, with damaged checksums."""
    return (
        messages.Checksums(b"1234567")
        if isinstance(message, messages.AskChecksums)
        else answer(message, caller)
    )
