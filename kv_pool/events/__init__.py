"""The event stream on the wire: batches, sequence numbers, publisher; pyzmq is imported only in here."""
