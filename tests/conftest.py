from hypothesis import settings

# An example has no deadline, because other work on the cores would make it fail. A failure prints
# the blob for `@reproduce_failure`, because CI does not keep the example database.
settings.register_profile("kvstow", deadline=None, print_blob=True)
settings.load_profile("kvstow")
