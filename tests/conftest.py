from hypothesis import settings

# No deadline per example: on shared cores it would measure the neighbours. A failure prints the
# blob that `@reproduce_failure` replays, for where the example database is not kept.
settings.register_profile("kvstow", deadline=None, print_blob=True)
settings.load_profile("kvstow")
