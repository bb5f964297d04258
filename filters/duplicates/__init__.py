"""Exact and near duplicates.

exact.py groups by keys; search.py runs the near pass (clusters.py places rows, compare.py and near.py compare
them, recall.py says what was missed), rules.py decides who stays, result.py answers what is asked of it.
"""
