"""What several test files share: helpers, oracles, made-up models and results, and work for processes that tests start.

Tables of cases stay beside the tests that run them (`tests/measures/cases.py`). Nothing in here is collected.
"""
