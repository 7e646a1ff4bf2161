"""Files and batches: stored in a directory, and answered line by line at a lower priority than interactive requests.

A line takes the same path as an HTTP request, without a connection. No module here depends on an answer format.
"""
