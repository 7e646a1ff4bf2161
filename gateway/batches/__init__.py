"""Files and batches: kept in a directory, answered line by line behind everybody else's requests.

Lines go a chat's way in and back, without a connection. Nothing here knows a format of answers.
"""
