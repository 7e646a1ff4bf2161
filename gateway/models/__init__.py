"""The served models: what is told of each at the start, what each has here, and which one a request means.

A chat's way in asks here which model it is for, and whether it is let in.
"""
