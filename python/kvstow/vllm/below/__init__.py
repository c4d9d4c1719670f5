"""The tiers below the host: a disk, a shared store, or a disk before a shared store.

Each has a part of each half: `disk` and `disk_worker`, `shared` and `shared_worker`, and `both` and
`both_worker` for a disk before a store. `lower_tier` and `lower_worker` have what these share.
`slow_loads` says which loads are not worth the wait. The host tier (`kvstow.vllm.tier`) makes the
scheduler half's part, and `kvstow.vllm.worker` the worker half's.

May import: kvstow, kvstow.observability, kvstow.sizes, kvstow.tiers, kvstow.transfer,
kvstow.vllm.messages, kvstow.vllm.options.
"""
