import pytest
from manager.salted_tenants import SaltedTenants

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request, SaltRegion

BLOCK_SIZE = 16


def make_manager(num_blocks=2000):
    return KVCacheManager(BlockPool(num_blocks, True, BLOCK_SIZE))


def compute(manager, request):
    """Compute the whole prompt. Return the number of tokens that a step had to compute."""
    prefix = manager.get_computed_blocks(request)
    num_computed = request.num_tokens - prefix.num_tokens
    assert manager.allocate_slots(request, num_computed, prefix) is not None
    manager.take_block_copies()
    request.num_computed_tokens = request.num_tokens
    return num_computed


@pytest.mark.parametrize(("num_shared", "num_public"), [(32 * 16, 32), (32 * 16 + 5, 32)])
def test_256_tenants_store_the_system_prompt_once(num_shared, num_public):
    """Exact counts: the public blocks once, the private ones once for each tenant."""
    manager = make_manager()
    hasher = BlockHasher(block_size=BLOCK_SIZE)
    tokens = list(range(num_shared + 43))  # the same private tokens for all, too
    tables = []
    for tenant in range(256):
        regions = [SaltRegion(num_shared, f"tenant-{tenant}")]
        request = Request(str(tenant), tokens, hasher, salt_regions=regions)
        num_computed = compute(manager, request)
        assert num_computed == len(tokens) - (num_public * BLOCK_SIZE if tenant else 0)
        tables.append(manager.get_block_ids(str(tenant)))
    assert all(table[:num_public] == tables[0][:num_public] for table in tables)
    private = [block_id for table in tables for block_id in table[num_public:]]
    num_private = -(-len(tokens) // BLOCK_SIZE) - num_public
    assert len(set(private)) == len(private) == 256 * num_private
    num_used = manager.block_pool.num_gpu_blocks - 1 - manager.get_num_free_blocks()
    assert num_used == num_public + 256 * num_private
    num_full = len(tokens) // BLOCK_SIZE
    assert len(manager.block_pool.cached_block_hash_to_block) == num_public + 256 * (num_full - num_public)


def test_the_same_salt_hits_and_another_does_not():
    """The channel of CVE-2025-46570: an attacker guesses a prompt, and counts what has to be computed."""
    hasher = BlockHasher(block_size=BLOCK_SIZE)
    secret = list(range(1000, 1256))

    def measure(victim, attacker):
        """Return how many tokens a step computes for the right guess and for a wrong one."""
        counts = []
        for guess in (secret, secret[::-1]):
            manager = make_manager()
            compute(manager, Request("victim", secret, hasher, **victim))
            counts.append(compute(manager, Request("attacker", guess, hasher, **attacker)))
        return counts

    assert measure({}, {}) == [16, 256]  # without salts, the right guess is fast
    for salted in (lambda salt: {"cache_salt": salt}, lambda salt: {"salt_regions": [SaltRegion(0, salt)]}):
        assert measure(salted("a"), salted("a")) == [16, 256]
        assert measure(salted("a"), salted("b")) == [256, 256]
        assert measure(salted("a"), {}) == [256, 256]
        assert measure({}, salted("b")) == [256, 256]


def test_no_hit_across_private_salts():
    tenants = SaltedTenants(0)
    tenants.run(30_000, share_of_writes=0.2)
    check(tenants)


def check(tenants):
    assert tenants.num_foreign_blocks == 0
    assert tenants.num_private_blocks > tenants.num_lookups // 20
    assert tenants.num_public_blocks > tenants.num_lookups // 2
    assert tenants.manager.block_pool.num_evictions > 100
