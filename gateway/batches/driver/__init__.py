"""`pagestream batches`: a program that leases batches and answers their lines at a lower priority.

A line takes the same path as an HTTP request, without a connection. No module here depends on an answer format.
"""
