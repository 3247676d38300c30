"""The services that brokers share, on NATS JetStream: `penstock.cluster.shared` implemented with a
client of our own for the small part of the protocol that it takes."""
