"""Methods that use several devices: what is measured here, and what is simulated of hardware that is not.

measured     times of forwards, agreement of early exits and of a draft model, the trees and paths of lookahead
schedules    when each device computes what, event by event; and the closed formulas of the papers
plots        the figure
command      `python -m research devices`
"""
