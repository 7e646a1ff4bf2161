"""Files and batches: kept in a directory, answered line by line behind everybody else's requests."""
