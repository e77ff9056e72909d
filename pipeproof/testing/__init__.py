"""Public helpers for tests: a conformance suite for backends, and a fake backend that follows any table."""
