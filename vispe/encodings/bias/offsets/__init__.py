"""Biases with learned entries per offset: tables, buckets and relative vectors."""
