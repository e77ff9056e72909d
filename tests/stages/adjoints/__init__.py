"""The adjoint identity for every operation of a stage: ``world`` has the ranks and the test, ``cases`` the table."""
