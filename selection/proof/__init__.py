"""Proof that a selection is worth its cost: time to accuracy, everything counted (methods, section 5).

`arms` says what is trained on what, `trainings` trains each arm with each seed once and keeps the results,
`result` puts them together: table, first time at the target, verdict, picture.
"""
